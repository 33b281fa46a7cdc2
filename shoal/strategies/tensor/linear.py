"""Column and row parallel linear layers, and the dropout between them.

    column   each rank has some outputs   weight (out/T, in), bias (out/T)    full x -> shard of y
    row      each rank has some inputs    weight (out, in/T), bias (out)      shard of x -> full y

    x ──> column ──> GELU ──> row ──> sum         one sum of y forward, one of x's gradient backward

GPT-2's `Conv1D` is a linear layer with a transposed weight:

    column   weight (in, out/T), bias (out/T)        row   weight (in/T, out), bias (out)

A fused column layer holds query, key and value in one matrix: see `fused_qkv.py`.

Source: Shoeybi et al., arXiv:1909.08053, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.comm.axis import Axis
from shoal.comm.mappings import local_slice, reduce_from_region
from shoal.strategies.tensor.fused_qkv import regroup_qkv
from shoal.strategies.tensor.region import (
    Region,
    column_outside,
    local_part,
    local_shard,
    reduce_scatter_sequence,
    shard_outside,
)


class ColumnParallelLinear(nn.Linear):
    """Computes this rank's shard of the outputs."""

    region: Region

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = local_shard(self.weight), local_shard(self.bias)
        if self.region.is_outside():
            return column_outside(lambda x: F.linear(x, weight, bias), x, self.region.axis, -1)
        return self.region.enter(x).linear(weight, bias)


class FusedColumnParallelLinear(nn.Linear):
    """Column parallel layer of several matrices, one below the other.

    Attributes:
        parts: the number of matrices.
    """

    region: Region
    parts: int

    def forward(self, x: Tensor) -> Tensor:
        axis = self.region.axis
        weight = regroup_qkv(local_shard(self.weight), axis, self.parts)
        bias = None if self.bias is None else regroup_qkv(local_shard(self.bias), axis, self.parts)
        return self.region.enter(x).linear(weight, bias)


class RowParallelLinear(nn.Linear):
    """Takes this rank's shard of the inputs; the sum over ranks is the output.

    Attributes:
        shard_dim: the sequence dimension of the output if it is sequence parallel; else None.
    """

    region: Region
    shard_dim: int | None

    def forward(self, x: Tensor) -> Tensor:
        return row_parallel_linear(x, local_shard(self.weight), self)


class ColumnParallelGPT2Conv1D(nn.Module):
    """ColumnParallelLinear for GPT-2's `Conv1D`."""

    region: Region
    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = local_shard(self.weight).t(), local_shard(self.bias)
        if self.region.is_outside():
            return column_outside(lambda x: F.linear(x, weight, bias), x, self.region.axis, -1)
        return self.region.enter(x).linear(weight, bias)


class FusedColumnParallelGPT2Conv1D(nn.Module):
    """FusedColumnParallelLinear for GPT-2's `Conv1D`; its matrices stand side by side."""

    region: Region
    parts: int
    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        axis = self.region.axis
        weight = regroup_qkv(local_shard(self.weight).t(), axis, self.parts)
        bias = regroup_qkv(local_shard(self.bias), axis, self.parts)
        return self.region.enter(x).linear(weight, bias)


class RowParallelGPT2Conv1D(nn.Module):
    """RowParallelLinear for GPT-2's `Conv1D`."""

    region: Region
    shard_dim: int | None
    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return row_parallel_linear(x, local_shard(self.weight).t(), self)


def row_parallel_linear(x: Tensor, weight: Tensor, layer: Any) -> Tensor:
    """Return the output of a row parallel layer. Collective.

    Args:
        x: (..., in/T), this rank's shard; (..., in) outside of the layer's region.
        weight: (out, in/T), this rank's shard.
    """
    axis, shard_dim = layer.region.axis, layer.shard_dim
    if layer.region.is_outside():
        x, shard_dim = shard_outside(x, axis, -1), None
    return add_bias(row_parallel_matmul(x, weight, axis, shard_dim), layer.bias)


def row_parallel_matmul(x: Tensor, weight: Tensor, axis: Axis, shard_dim: int | None) -> Tensor:
    """Return the output of a row parallel layer before its bias. Collective.

    Args:
        x: (..., in/T), this rank's shard.
        weight: (out, in/T), this rank's shard.
        shard_dim: the sequence dimension for a sequence parallel output. The output is replicated
            if this is None, or if it has no dimensions for both samples and tokens.
    """
    y = F.linear(x, weight)
    if shard_dim is None or y.dim() < 3:
        return reduce_from_region(y, axis)
    return reduce_scatter_sequence(y, axis, shard_dim)


def add_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    """Add a replicated bias after the sum over ranks, so that it counts once."""
    output: Tensor = y if bias is None else y + local_part(bias).to(y.dtype)
    return output


class ShardedDropout(nn.Dropout):
    """Draws for all hidden units, as one device does, and keeps this rank's shard.

    So all ranks draw the same random numbers, and their generators stay equal.
    """

    axis: Axis
    dim: int
    region: Region

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if self.region.is_outside():
            return F.dropout(x, self.p)
        shape = list(x.shape)
        shape[self.dim] *= self.axis.size
        factors = F.dropout(torch.ones(shape, dtype=x.dtype, device=x.device), self.p)
        # A clone: a view would keep all factors in memory until the backward pass.
        return x * local_slice(factors, self.axis, self.dim).clone()
