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
from shoal.comm.mappings import local_slice, reduce_from_region
from shoal.strategies.tensor.column_input import reduce_scatter_sequence
from shoal.strategies.tensor.region import Region, local_shard


class ColumnParallelLinear(nn.Linear):
    """Gives this rank's slice of the outputs."""

    region: Region

    def forward(self, x: Tensor) -> Tensor:
        return self.region.entered(x).linear(local_shard(self.weight), local_shard(self.bias))


class RowParallelLinear(nn.Linear):
    """Takes this rank's slice of the inputs; the outputs are whole, or lie in slices of the
    sequence.

    Attributes: along: the dimension of the sequence in the output, where that is to lie in slices.
    """

    region: Region
    shard_dim: int | None

    def forward(self, x: Tensor) -> Tensor:
        return add_bias(
            row_parallel_matmul(x, local_shard(self.weight), self.region.axis, self.shard_dim),
            self.bias,
        )


def row_parallel_matmul(x: Tensor, weight: Tensor, axis: Axis, along: int | None) -> Tensor:
    """What a row layer gives before its bias; without a dimension for samples and one for time
    it stays whole.
    """
    y = F.linear(x, weight)
    return (
        reduce_from_region(y, axis)
        if along is None or y.dim() < 3
        else reduce_scatter_sequence(y, axis, along)
    )


def add_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    """A whole bias is added once, after the sum."""
    z: Tensor = y if bias is None else y + local_shard(bias).to(y.dtype)
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
        return (
            x * local_slice(factors, self.axis, self.dim).clone()
        )  # or all of them are kept for the backward pass
