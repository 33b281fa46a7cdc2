"""What ranks of one axis exchange inside a forward pass, and what follows from it for the backward
pass.

    copy       forward: nothing                 backward: the gradients of all ranks are summed
    total      forward: the ranks' are summed   backward: nothing
    joined     forward: slices become a whole   backward: each rank takes the gradient of its slice

`copy` and `total` are f and g of Shoeybi et al., arXiv:1909.08053, figure 3. In all of them what is
whole is the same on every rank of the axis, and so is its gradient. Collective, in the backward
pass too. `join` and `scatter` are the halves of a sum, for slices of which the last may be shorter,
or empty; what follows backward is their callers' matter."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.axis import Axis
from shoal.comm.equal_chunks import all_gather

# torch 2.13 renamed it, and warns about the old name.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def copy_to_region(x: Tensor, axis: Axis) -> Tensor:
    """`x`, for a function of which each rank computes its part."""
    found: Tensor = _Copy.apply(x, axis)
    return found


def reduce_from_region(x: Tensor, axis: Axis) -> Tensor:
    """The sum over ranks of `x`; `x` itself is overwritten."""
    found: Tensor = _Total.apply(x, axis)
    return found


def gather_from_region(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """All ranks' `x`, one after the other along `dim`."""
    found: Tensor = _Joined.apply(x, axis, dim)
    return found


def local_slice(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's slice: a view, without a word to anyone. The last ranks have less of what T
    does not divide.
    """
    length = x.shape[dim]
    size = -(-length // axis.size)
    start = min(axis.rank * size, length)
    return x.narrow(dim, start, min(size, length - start))


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.axis.all_reduce(gradient.clone(memory_format=torch.contiguous_format)), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        # The same memory, and no view in the eyes of autograd: what follows may write into it.
        return axis.all_reduce(x.detach().contiguous())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return all_gather_dim(x, axis, dim, axis.size * x.shape[dim])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return local_slice(gradient, ctx.axis, ctx.dim).contiguous(), None, None


def all_gather_dim(x: Tensor, axis: Axis, dim: int, length: int) -> Tensor:
    """The whole, `length` along `dim`, of which each rank has what `slice_of` gives; no
    gradient. Collective.
    """
    front = _filled(x.movedim(dim, 0), -(-length // axis.size))
    whole = front.new_empty(axis.size * len(front), *front.shape[1:])
    all_gather(whole, front, axis.group)
    return whole[:length].movedim(0, dim).contiguous()


def reduce_scatter_dim(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """What `slice_of` gives of the sum over ranks of `x`; no gradient. Collective."""
    length = x.shape[dim]
    size = -(-length // axis.size)
    front = _filled(x.movedim(dim, 0), size * axis.size)
    own = front.new_empty(size, *front.shape[1:])
    _reduce_scatter(own, front, group=axis.group)
    left = min(size, length - min(axis.rank * size, length))
    return own[:left].movedim(0, dim).contiguous()


def _filled(x: Tensor, length: int) -> Tensor:
    """Contiguous, and with zeros behind it as long as those of others."""
    if len(x) == length:
        return x.contiguous()
    filled = x.new_zeros(length, *x.shape[1:])
    filled[: len(x)] = x
    return filled
