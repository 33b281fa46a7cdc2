"""Linear layers in slices, and what may stand between the two of a pair.

    column   each rank has some of the outputs      weight (out/T, in), bias (out/T)      x whole  -> y a slice
    row      each rank has some of the inputs       weight (out, in/T), bias whole        x a slice -> y summed, whole

    x ──> column ──> GELU ──> row ──> total            one sum of y forward, one of x's gradient backward

Source: Shoeybi et al., arXiv:1909.08053, section 3.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.comm.axis import Axis
from shoal.comm.exchange import slice_of, total
from shoal.strategies.sliced.entered import scattered
from shoal.strategies.sliced.region import Region, here


class ColumnLinear(nn.Linear):
    """Gives this rank's slice of the outputs."""

    region: Region

    def forward(self, x: Tensor) -> Tensor:
        return self.region.entered(x).linear(here(self.weight), here(self.bias))


class RowLinear(nn.Linear):
    """Takes this rank's slice of the inputs; the outputs are whole, or lie in slices of the sequence.

    Attributes: along: the dimension of the sequence in the output, where that is to lie in slices.
    """

    region: Region
    along: int | None

    def forward(self, x: Tensor) -> Tensor:
        return added(summed(x, here(self.weight), self.region.axis, self.along), self.bias)


def summed(x: Tensor, weight: Tensor, axis: Axis, along: int | None) -> Tensor:
    """What a row layer gives before its bias; without a dimension for samples and one for time it stays whole."""
    y = F.linear(x, weight)
    return total(y, axis) if along is None or y.dim() < 3 else scattered(y, axis, along)


def added(y: Tensor, bias: Tensor | None) -> Tensor:
    """A whole bias is added once, after the sum."""
    z: Tensor = y if bias is None else y + here(bias).to(y.dtype)
    return z


class SlicedDropout(nn.Dropout):
    """Draws for the whole, as one device does, and keeps its slice."""

    axis: Axis
    dim: int

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        shape = list(x.shape)
        shape[self.dim] *= self.axis.size
        factors = F.dropout(torch.ones(shape, dtype=x.dtype, device=x.device), self.p)
        return x * slice_of(factors, self.axis, self.dim).clone()  # or all of them are kept for the backward pass
