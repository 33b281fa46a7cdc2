"""Which functions take each token by itself, and how: those that draw, or that are made of others,
in words of these.

Only what is named here runs on slices of the sequence.
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
    if not training or p == 0:
        same: Tensor = x
        return same
    ones = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).fill_(1.0)
    factors = x.like(local_slice(F.dropout(ones, p), x.axis, x.shard_dim).clone())
    found: Tensor = x.mul_(factors) if inplace else x * factors
    return found


def _rms_norm(
    x: Any, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    dims = [*range(-len(normalized_shape), 0)]
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    found: Tensor = x * torch.rsqrt(x.square().mean(dims, keepdim=True) + eps)
    return found if weight is None else found * weight


def _new(name: str) -> Callable[..., Tensor]:
    """Makes a tensor of the asked shape, whole."""
    return lambda x, *args, **options: getattr(x.local, name)(*args, **options)


def _named(names: str) -> set[Any]:
    """Functions and methods of these names."""
    owners = (torch, Tensor, F)
    return {
        getattr(owner, name) for name in names.split() for owner in owners if hasattr(owner, name)
    }


IN_PLACE = _named("add_ sub_ mul_ div_ relu_ __iadd__ __isub__ __imul__ __itruediv__")
PASS_THROUGH = IN_PLACE | _named(
    "add sub rsub mul div true_divide neg pow rsqrt sqrt square abs exp tanh sigmoid relu gelu "
    "silu clamp "
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __neg__ __pow__ "
    "to float double half bfloat16 type_as contiguous clone detach mean sum layer_norm transpose "
    "zeros_like ones_like"
)
"""Functions that take each token by itself, or of which it is known what follows for the slices."""
SPECIAL: dict[Any, Any] = {
    F.dropout: _dropout,
    F.rms_norm: _rms_norm,
    **{
        getattr(Tensor, name): _new(name)
        for name in ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")
    },
}
DESCRIBING = {
    *_named(
        "dim size stride numel ndimension is_floating_point is_complex is_contiguous element_size "
        "storage_offset"
    ),
    *_named("register_hook retain_grad requires_grad_ get_device __len__ __hash__"),
    *(IS_VIEW, READ_VERSION, READ_BASE),
    *(
        getattr(Tensor, name).__get__
        for name in (
            *(
                "shape",
                "ndim",
                "dtype",
                "device",
                "layout",
                "is_cuda",
                "is_leaf",
                "requires_grad",
                "grad_fn",
                "grad",
            ),
            *("data", "is_sparse", "is_nested", "is_quantized", "is_meta", "output_nr"),
        )
    ),
}
"""What asks a tensor about itself, and nothing about its numbers."""
