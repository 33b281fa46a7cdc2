"""Differentiable collectives at the borders of tensor parallel regions.

                            forward                   backward
    copy_to_region          none                      all-reduce of the gradients
    reduce_from_region      all-reduce                none
    gather_from_region      all-gather of slices      the gradient of the local slice
    slice_to_region         the local slice           all-gather of the gradients

`copy_to_region` and `reduce_from_region` are f and g of Shoeybi et al., arXiv:1909.08053, figure 3.
A full tensor is the same on every rank of the axis, and so is its gradient. All of them are
collective, in the backward pass too.

`all_gather_dim` and `reduce_scatter_dim` have no gradient; their callers define one. The length may
be no multiple of the number of ranks. The last slices are then shorter, or empty."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal.comm.axis import Axis
from shoal.comm.equal_chunks import all_gather, reduce_scatter

Map = Callable[[Tensor], Tensor]


def conjugate(x: Tensor, forward: Map, backward: Map, first: Map | None = None) -> Tensor:
    """Return `forward(x)`, a linear function of which `backward` is the backward pass.

    Each is the backward pass of the other, so gradients of gradients are right too.

    Args: first: called in the place of `forward`, once; it may write into `x`.
    """
    output: Tensor = _Conjugate.apply(x, forward, backward, first)
    return output


class _Conjugate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Map, backward: Map, first: Map | None) -> Tensor:
        ctx.maps = backward, forward
        return (first or forward)(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return conjugate(gradient, *ctx.maps), None, None, None


def copy_to_region(x: Tensor, axis: Axis) -> Tensor:
    """Return `x`, as the input of a region of which each rank computes a part."""
    return conjugate(x, Tensor.detach, partial(_sum, axis))


def reduce_from_region(x: Tensor, axis: Axis) -> Tensor:
    """Sum `x` over the axis. `x` itself is overwritten if it is contiguous.

    The result has its memory, but autograd does not see a view, so later operations may write into
    it.
    """
    return conjugate(
        x, partial(_sum, axis), Tensor.detach, lambda x: axis.all_reduce(x.detach().contiguous())
    )


def gather_from_region(
    x: Tensor, axis: Axis, dim: int, length: int | None = None, first: Map | None = None
) -> Tensor:
    """Concatenate the `x` of all ranks along `dim`.

    Args:
        length: of the result, whose `local_slice` is `x`; None if all have the same length.
        first: as of `conjugate`.
    """
    length = axis.size * x.shape[dim] if length is None else length
    gather, take = _gather_and_slice(axis, dim, length)
    return conjugate(x, gather, take, first)


def slice_to_region(x: Tensor, axis: Axis, dim: int, first: Map | None = None) -> Tensor:
    """Return this rank's slice of a full `x` along `dim`.

    The slice may be a copy. Collective in the backward pass.

    Args: first: as of `conjugate`.
    """
    gather, take = _gather_and_slice(axis, dim, x.shape[dim])
    return conjugate(x, take, gather, first)


def _gather_and_slice(axis: Axis, dim: int, length: int) -> tuple[Map, Map]:
    return (
        lambda x: all_gather_dim(x, axis, dim, length),
        lambda x: local_slice(x, axis, dim).contiguous(),
    )


def local_slice(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return this rank's slice along `dim`, a view. Nothing is sent.

    All slices have the same length except the last ones, which are shorter or empty if the number
    of ranks does not divide the length.
    """
    length = x.shape[dim]
    size = -(-length // axis.size)
    start = min(axis.rank * size, length)
    return x.narrow(dim, start, min(size, length - start))


def _sum(axis: Axis, x: Tensor) -> Tensor:
    return axis.all_reduce(x.clone(memory_format=torch.contiguous_format))


def all_gather_dim(x: Tensor, axis: Axis, dim: int, length: int) -> Tensor:
    """Gather a tensor of `length` along `dim`, whose `local_slice` on each rank is `x`.
    Collective; no gradient.
    """
    padded = _padded(x.movedim(dim, 0), -(-length // axis.size))
    full = padded.new_empty(axis.size * len(padded), *padded.shape[1:])
    all_gather(full, padded, axis.group)
    return full[:length].movedim(0, dim).contiguous()


def reduce_scatter_dim(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return the `local_slice` along `dim` of the sum of `x` over the axis.
    Collective; no gradient.
    """
    length = x.shape[dim]
    size = -(-length // axis.size)
    padded = _padded(x.movedim(dim, 0), size * axis.size)
    local = padded.new_empty(size, *padded.shape[1:])
    reduce_scatter(local, padded, group=axis.group)
    local_length = min(size, length - min(axis.rank * size, length))
    return local[:local_length].movedim(0, dim).contiguous()


def _padded(x: Tensor, length: int) -> Tensor:
    """Return `x`, contiguous and with zeros up to `length` along dim 0."""
    if len(x) == length:
        return x.contiguous()
    padded = x.new_zeros(length, *x.shape[1:])
    padded[: len(x)] = x
    return padded
