"""Functions of torch that run on sequence parallel tensors, because they compute tokenwise.

Dropout, which draws, and RMSNorm, which is made of other functions, are replaced by functions of
this file. A function that is not listed here runs on the gathered tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.comm.mappings import local_slice
from shoal.platform.torch_private.tensor_state import IS_VIEW, READ_BASE, READ_VERSION


def _dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Draw for all tokens, in the memory order of one device, and keep this rank's."""
    if not training or p == 0:
        unchanged: Tensor = x
        return unchanged
    ones = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).fill_(1.0)
    factors = x.like(local_slice(F.dropout(ones, p), x.axis, x.shard_dim).clone())
    output: Tensor = x.mul_(factors) if inplace else x * factors
    return output


def _rms_norm(
    x: Any, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    dims = [*range(-len(normalized_shape), 0)]
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    normalized: Tensor = x * torch.rsqrt(x.square().mean(dims, keepdim=True) + eps)
    return normalized if weight is None else normalized * weight


def _factory(name: str) -> Callable[..., Tensor]:
    """Return the method `new_zeros` or the like, for a replicated result."""
    return lambda x, *args, **options: getattr(x.local, name)(*args, **options)


def _functions(names: str) -> set[Any]:
    """Return the functions and methods of torch with these names, separated by spaces."""
    owners = (torch, Tensor, F)
    return {
        getattr(owner, name) for name in names.split() for owner in owners if hasattr(owner, name)
    }


def _attributes(names: str) -> set[Any]:
    """Return what reads these attributes of a tensor."""
    return {getattr(Tensor, name).__get__ for name in names.split()}


IN_PLACE_FUNCTIONS = _functions("add_ sub_ mul_ div_ relu_ __iadd__ __isub__ __imul__ __itruediv__")
TOKENWISE_FUNCTIONS = IN_PLACE_FUNCTIONS | _functions(
    "add sub rsub mul div true_divide neg pow rsqrt sqrt square abs exp tanh sigmoid relu gelu "
    "silu clamp "
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __neg__ __pow__ "
    "to float double half bfloat16 type_as contiguous clone detach mean sum layer_norm transpose "
    "zeros_like ones_like"
)
"""Functions whose operators have rules in `sequence_dispatch.py`.

Most compute each token by itself. For mean, sum and transpose the rule depends on their dims.
"""
REPLACED_FUNCTIONS: dict[Any, Any] = {
    F.dropout: _dropout,
    F.rms_norm: _rms_norm,
    Tensor.new_empty: _factory("new_empty"),
    Tensor.new_zeros: _factory("new_zeros"),
    Tensor.new_ones: _factory("new_ones"),
    Tensor.new_full: _factory("new_full"),
    Tensor.new_tensor: _factory("new_tensor"),
}
METADATA_FUNCTIONS = {
    *_functions(
        "dim size stride numel ndimension is_floating_point is_complex is_contiguous element_size "
        "storage_offset register_hook retain_grad requires_grad_ get_device __len__ __hash__"
    ),
    *_attributes(
        "shape ndim dtype device layout is_cuda is_leaf requires_grad grad_fn grad data is_sparse "
        "is_nested is_quantized is_meta output_nr"
    ),
    *(IS_VIEW, READ_VERSION, READ_BASE),
}
"""Functions that read no values of a tensor: they run on the wrapper."""
