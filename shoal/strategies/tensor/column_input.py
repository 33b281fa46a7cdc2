"""What goes into column layers and comes out of row layers, where the stream between them lies
whole or in slices.

      row layer ─┐                                   ┌─ column layer
                 │  total           x whole          │             whole: a sum forward, a sum backward
                 │  reduce-scatter  x in slices      │  all-gather  in slices: the same bytes in two halves

A gathered x is not kept for the backward pass: the gradient of a weight needs it once more, and it
is gathered again.

Source: Korthikanti et al., arXiv:2205.05198, section 4.2.2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.comm.axis import Axis
from shoal.comm.mappings import copy_to_region, reduce_scatter_dim
from shoal.strategies.tensor.sequence import (
    GatherForward,
    SequenceParallelTensor,
    gathered_gradient,
)


class ColumnInput(NamedTuple):
    """An input of column layers.

    Attributes:
        whole: all of it, of whose gradient each rank will have a part.
        slices: what it was gathered from, if it was.
        again: is shared by all layers that take it.
    """

    whole: Tensor
    slices: SequenceParallelTensor | None = None
    again: RegatherInBackward | None = None

    def linear(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """This rank's slice of the outputs. weight: (out/T, in), bias: (out/T), both this
        rank's.
        """
        if self.slices is None or self.again is None:
            return F.linear(self.whole, weight, bias)
        if torch.is_autocast_enabled(weight.device.type):  # as F.linear would
            weight, bias = (
                weight.to(self.whole.dtype),
                None if bias is None else bias.to(self.whole.dtype),
            )
        found: Tensor = _Linear.apply(self.whole, self.slices, weight, bias, self.again)
        return found


def to_column_input(x: Tensor, axis: Axis) -> ColumnInput:
    """`x`, whole or in slices of the sequence, for column layers. Collective where it lies in
    slices.
    """
    if not isinstance(x, SequenceParallelTensor):
        return ColumnInput(copy_to_region(x, axis))
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.is_floating_point():
        x = x.to(torch.get_autocast_dtype(kind))  # before it is sent
    assert isinstance(x, SequenceParallelTensor)
    return ColumnInput(_Gathered.apply(x), x, RegatherInBackward())


def reduce_scatter_sequence(partial: Tensor, axis: Axis, along: int) -> Tensor:
    """The sum over ranks of `partial`, in slices along dimension `along`. Collective."""
    found: Tensor = _Scattered.apply(partial, axis, along % partial.dim())
    return found


class RegatherInBackward:
    """Gathers an input once more in the backward pass, once for all layers that took it."""

    def __init__(self) -> None:
        self.readers, self.left = 0, 0
        self.whole: Tensor | None = None

    def gathered(self, x: SequenceParallelTensor) -> Tensor:
        whole = x.gathered() if self.whole is None else self.whole
        self.left = (self.left or self.readers) - 1
        self.whole = whole if self.left else None
        return whole


class _Gathered(GatherForward):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        own = reduce_scatter_dim(gradient, ctx.axis, ctx.shard_dim)
        return SequenceParallelTensor.of(
            own, ctx.axis, ctx.shard_dim, gradient.shape[ctx.shard_dim], ctx.order
        )


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, axis: Axis, along: int) -> Tensor:
        return SequenceParallelTensor.of(
            reduce_scatter_dim(partial, axis, along), axis, along, partial.shape[along]
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gathered_gradient(gradient), None, None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        whole: Tensor,
        slices: SequenceParallelTensor,
        weight: Tensor,
        bias: Tensor | None,
        again: RegatherInBackward,
    ) -> Tensor:
        ctx.save_for_backward(slices, weight)
        ctx.again = again
        again.readers += weight.requires_grad
        return F.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        slices, weight = ctx.saved_tensors
        _, _, of_weight, of_bias, _ = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        found_weight = None
        if of_weight:
            whole = (
                ctx.again.gathered(slices) if isinstance(slices, SequenceParallelTensor) else slices
            )
            found_weight = rows.t() @ whole.flatten(0, -2)
        of_whole = gradient @ weight if ctx.needs_input_grad[0] else None
        return of_whole, None, found_weight, rows.sum(0) if of_bias else None, None
