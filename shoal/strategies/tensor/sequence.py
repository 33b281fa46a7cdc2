"""Sequence parallel tensors: activations that are divided along the sequence between regions.

      x          t0 t1 t2 t3 t4          one device
      rank 0     t0 t1 t2                T = 2: LayerNorm, dropout, residual additions see these
      rank 1              t3 t4          the last ranks have fewer where T does not divide

Such a tensor has the shape of the full tensor and gives the same numbers.

    - Functions that compute each token by itself run on this rank's tokens.
    - Any other function gets the full tensor, gathered: slower, and as exact (`lazy_gather.py`).
    - Replicated tensors in the same function, such as weights of norms, get a full gradient.
    - Random numbers are drawn for all tokens, of which a rank keeps its own.

Source: Korthikanti et al., arXiv:2205.05198, section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.comm.axis import Axis
from shoal.comm.mappings import copy_to_region, local_slice, reduce_from_region, slice_to_region
from shoal.platform.tensors import is_in_order
from shoal.platform.torch_private.pytree import tree_leaves, tree_map_only
from shoal.platform.torch_private.subclasses import DisableTorchFunctionSubclass
from shoal.strategies.tensor.lazy_gather import (
    AUTOGRAD_FUNCTIONS,
    LazyGatherTensor,
    check_first_derivative,
)


class SequenceParallelTensor(LazyGatherTensor):
    """A tensor of which this rank has `local`, its tokens along `shard_dim`."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Describe the tensor without its values: a gather needs the other ranks."""
        return (
            f"SequenceParallelTensor(shape={tuple(self.shape)}, "
            f"local shape={tuple(self.local.shape)}, dim={self.shard_dim})"
        )

    def __format__(self, _: str) -> str:
        return repr(self)


def gather_all(nest: Any) -> Any:
    """Return a nest with all sequence parallel tensors gathered, differentiable. Collective."""
    return tree_map_only(SequenceParallelTensor, lambda x: x.full_tensor, nest)


class _TokenLayout(NamedTuple):
    """Layout of the tokens in the arguments of an elementwise function.

    Tensors are broadcast from their last dims, so the dim of tokens is counted from there.
    """

    axis: Axis
    dim_from_last: int  # 1 is the last dim
    length: int  # of the full sequence

    def fits(self, x: Tensor) -> bool:
        """Return True for a sequence parallel tensor of this layout."""
        return (
            isinstance(x, SequenceParallelTensor)
            and x.dim() - x.shard_dim == self.dim_from_last
            and x.shape[x.shard_dim] == self.length
        )

    def local(self, x: Tensor) -> Tensor:
        """Return this rank's tokens; a tensor that is broadcast over tokens as it is."""
        if isinstance(x, SequenceParallelTensor):
            if self.fits(x):
                return x.local
            x = x.full_tensor
        needs_gradient = x.requires_grad and torch.is_grad_enabled()
        if x.dim() < self.dim_from_last or x.shape[-self.dim_from_last] != self.length:
            return copy_to_region(x, self.axis) if needs_gradient else x
        dim = x.dim() - self.dim_from_last
        return (slice_to_region if needs_gradient else local_slice)(x, self.axis, dim)


def _elementwise(func: Any, *args: Any, **options: Any) -> Any:
    """Compute this rank's tokens of an elementwise function.

    The result must have the tokens of the longest argument: then each rank has all it needs.
    """
    tensors = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)]
    layout = _token_layout(tensors)
    if layout is None:
        return NotImplemented
    local_args, local_options = tree_map_only(Tensor, layout.local, (args, options))
    local = func(*local_args, **local_options)
    # Where nothing was transposed, the result is contiguous: no need to ask torch.
    is_contiguous = all(tensor.is_contiguous() for tensor in tensors)
    memory_order = None if is_contiguous else _result_memory_order(func, args, options)
    longest = next(x for x in tensors if layout.fits(x))
    assert isinstance(longest, SequenceParallelTensor)
    return longest.like(local, memory_order=memory_order)


def _token_layout(tensors: Sequence[Tensor]) -> _TokenLayout | None:
    """Return the layout of an elementwise result; None if it is not that of one argument."""
    if not all(type(x) in (Tensor, nn.Parameter, SequenceParallelTensor) for x in tensors):
        return None  # other subclasses of Tensor have rules of their own
    sharded = [x for x in tensors if isinstance(x, SequenceParallelTensor)]
    # One of length 1 may be broadcast over the tokens of another.
    longest = max(sharded, key=lambda x: x.shape[x.shard_dim])
    layout = _TokenLayout(
        longest.axis, longest.dim() - longest.shard_dim, longest.shape[longest.shard_dim]
    )
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    return layout if shape[-layout.dim_from_last] == layout.length else None


def _result_memory_order(func: Any, args: Any, options: Any) -> tuple[int, ...]:
    """Return how the result would lie in memory on one device.

    torch has rules of its own for that, so it is asked with tensors on the meta device.
    """

    def to_meta(x: Tensor) -> Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    meta_args, meta_options = tree_map_only(Tensor, to_meta, (args, options))
    result = func(*meta_args, **meta_options)
    return tuple(sorted(range(result.dim()), key=lambda dim: -result.stride(dim)))


def _in_place(func: Any, x: Any, *args: Any, **options: Any) -> Any:
    """Write into this rank's tokens, unless somebody has the full tensor."""
    tensors = [x, *(leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor))]
    is_sharded = isinstance(x, SequenceParallelTensor)
    if not is_sharded or any(member._full is not None for member in x.views.alive()):
        return NotImplemented
    layout = _token_layout(tensors)
    if layout is None or not layout.fits(x):
        return NotImplemented
    local_args, local_options = tree_map_only(Tensor, layout.local, (args, options))
    func(x.local, *local_args, **local_options)
    with DisableTorchFunctionSubclass():
        return _Written.apply(x, x.local)


class _Written(torch.autograd.Function):
    """A tensor after a write into its shard: autograd takes it for the shard as it is now."""

    @staticmethod
    def forward(ctx: Any, x: SequenceParallelTensor, local: Tensor) -> Any:
        ctx.axis, ctx.shard_dim = x.axis, x.shard_dim
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        check_first_derivative()
        return None, local_slice(gradient, ctx.axis, ctx.shard_dim).contiguous()


def _contiguous(x: SequenceParallelTensor) -> Any:
    if is_in_order(x.memory_order):
        return x
    return x.like(x.local.clone(memory_format=torch.contiguous_format))


def _transpose(x: SequenceParallelTensor, dim0: int, dim1: int) -> Any:
    """Swap two dims, in the layout too; no token leaves its rank."""
    new_dims = [*range(x.dim())]
    new_dims[dim0], new_dims[dim1] = new_dims[dim1], new_dims[dim0]
    memory_order = [new_dims[dim] for dim in x.memory_order]
    return x.like(x.local.transpose(dim0, dim1), new_dims[x.shard_dim], memory_order)


def _reduced(
    func: Any, x: SequenceParallelTensor, dim: Any = None, keepdim: bool = False, **options: Any
) -> Any:
    """Return a sum or a mean over some dims. A sum over the sequence is replicated."""
    dims = (dim,) if isinstance(dim, int) else tuple(dim or range(x.dim()))
    reduced = {each % x.dim() for each in dims}
    if not {*options} <= {"dtype"} or (x.shard_dim in reduced and "mean" in func.__name__):
        # Ranks may have different numbers of tokens, so a mean of their means would be wrong.
        return NotImplemented
    local = func(x.local, dims, keepdim, **options)
    if x.shard_dim in reduced:
        return reduce_from_region(local, x.axis)
    remaining = [each for each in range(x.dim()) if keepdim or each not in reduced]
    memory_order = [remaining.index(each) for each in x.memory_order if each in remaining]
    return x.like(local, remaining.index(x.shard_dim), memory_order)


def _layer_norm(
    x: Any,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    """Normalize this rank's tokens, if the norm is over dims behind that of tokens."""
    parameters = [each for each in (weight, bias) if each is not None]
    is_replicated = all(type(each) in (Tensor, nn.Parameter) for each in parameters)
    if not is_replicated or x.shard_dim >= x.dim() - len(normalized_shape):
        return NotImplemented
    if parameters:  # one message for the gradients of both, which have one shape
        copies = iter(copy_to_region(torch.stack(parameters), x.axis).unbind())
        weight, bias = (None if each is None else next(copies) for each in (weight, bias))
    return x.like(F.layer_norm(x.local, normalized_shape, weight, bias, eps))


def _rms_norm(
    x: Any, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    dims = [*range(-len(normalized_shape), 0)]
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    normalized: Tensor = x * torch.rsqrt(x.square().mean(dims, keepdim=True) + eps)
    return normalized if weight is None else normalized * weight


def _dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Draw for all tokens, in the memory order of one device, and keep this rank's."""
    if not training or p == 0:
        unchanged: Tensor = x
        return unchanged
    ones = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).fill_(1.0)
    own = local_slice(F.dropout(ones, p), x.axis, x.shard_dim).clone()
    factors = x.like(own, memory_order=x.memory_order)
    output: Tensor = x.mul_(factors) if inplace else x * factors
    return output


def _on_local(func: Any, x: SequenceParallelTensor, *args: Any, **options: Any) -> Any:
    """Call `new_zeros` or the like, for a replicated result."""
    return func(x.local, *args, **options)


def _functions(names: str) -> set[Any]:
    """Return the functions and methods of torch with these names, separated by spaces."""
    owners = (torch, Tensor, F)
    return {
        getattr(owner, name) for name in names.split() for owner in owners if hasattr(owner, name)
    }


IN_PLACE_FUNCTIONS = _functions("add_ sub_ mul_ div_ relu_ __iadd__ __isub__ __imul__ __itruediv__")
ELEMENTWISE_FUNCTIONS = _functions(
    "add sub rsub mul div true_divide neg pow rsqrt sqrt square abs exp tanh sigmoid relu gelu "
    "silu clamp __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ "
    "__neg__ __pow__ to float double half bfloat16 type_as clone zeros_like ones_like"
)
SequenceParallelTensor.broadcast_functions = ELEMENTWISE_FUNCTIONS
SequenceParallelTensor.shard_functions = {
    **AUTOGRAD_FUNCTIONS,
    **{func: partial(_elementwise, func) for func in ELEMENTWISE_FUNCTIONS},
    **{func: partial(_in_place, func) for func in IN_PLACE_FUNCTIONS},
    **{func: partial(_reduced, func) for func in _functions("sum mean")},
    **dict.fromkeys(_functions("transpose"), _transpose),
    Tensor.contiguous: _contiguous,
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    F.dropout: _dropout,
    **{f: partial(_on_local, f) for f in _functions("new_empty new_zeros new_ones new_full")},
}
"""Functions that run on this rank's tokens. One that is not listed gets the full tensor."""
