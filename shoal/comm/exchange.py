"""What ranks of one axis exchange inside a forward pass, and what follows from it for the backward pass.

    copy       forward: nothing                 backward: the gradients of all ranks are summed
    total      forward: the ranks' are summed   backward: nothing
    joined     forward: slices become a whole   backward: each rank takes the gradient of its slice
    own_slice  forward: each takes its slice    backward: the gradients of slices become a whole
    gathered   forward: slices become a whole   backward: gradients are summed, and each takes its slice
    scattered  forward: summed, each its slice  backward: the gradients of slices become a whole

`copy` and `total` are f and g of Shoeybi et al., arXiv:1909.08053, figure 3; `gathered` and `scattered` are g and its
conjugate in Korthikanti et al., MLSys 2023, figure 5. In all of them what is whole is the same on every rank of the
axis, and so is its gradient. Collective, in the backward pass too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.axis import Axis

# torch 2.13 renamed them, and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def copy(x: Tensor, axis: Axis) -> Tensor:
    """`x`, for a function of which each rank computes its part."""
    found: Tensor = _Copy.apply(x, axis)
    return found


def total(x: Tensor, axis: Axis) -> Tensor:
    """The sum over ranks of `x`; `x` itself is overwritten."""
    found: Tensor = _Total.apply(x, axis)
    return found


def joined(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """All ranks' `x`, one after the other along `dim`."""
    found: Tensor = _Joined.apply(x, axis, dim)
    return found


def own_slice(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's slice of a whole `x`; its size along `dim` is a multiple of the number of ranks."""
    found: Tensor = _OwnSlice.apply(x, axis, dim)
    return found


def gathered(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """As `joined`, for a function of which each rank computes its part."""
    found: Tensor = _Gathered.apply(x, axis, dim)
    return found


def scattered(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's slice of the sum over ranks of `x`."""
    found: Tensor = _Scattered.apply(x, axis, dim)
    return found


def slice_of(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's slice: a view, without a word to anyone."""
    size = x.shape[dim] // axis.size
    return x.narrow(dim, axis.rank * size, size)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.axis.sum(gradient.clone(memory_format=torch.contiguous_format)), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        # The same memory, and no view in the eyes of autograd: what follows may write into it.
        return axis.sum(x.detach().contiguous())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _join(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return slice_of(gradient, ctx.axis, ctx.dim).contiguous(), None, None


class _OwnSlice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return slice_of(x, axis, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _join(gradient, ctx.axis, ctx.dim), None, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _join(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _scatter(gradient, ctx.axis, ctx.dim), None, None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _scatter(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _join(gradient, ctx.axis, ctx.dim), None, None


def _join(x: Tensor, axis: Axis, dim: int) -> Tensor:
    front = x.movedim(dim, 0).contiguous()
    whole = front.new_empty(axis.size * len(front), *front.shape[1:])
    _all_gather(whole, front, group=axis.group)
    return whole.movedim(0, dim).contiguous()


def _scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    front = x.movedim(dim, 0).contiguous()
    own = front.new_empty(len(front) // axis.size, *front.shape[1:])
    _reduce_scatter(own, front, group=axis.group)
    return own.movedim(0, dim).contiguous()
