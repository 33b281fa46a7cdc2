"""Convolutions and norms that are divided along channels: the pairs of `linear.py`, for images.

    x ──> column ──> BatchNorm ──> ReLU ──> row ──> sum       statistics are those of one channel,
                                                              so they need no communication

DTensor's convolution is no alternative: with a weight that is sharded on output channels, it
declares its output replicated, at half the channels, without an error (torch 2.13,
pytorch#186129).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from shoal.comm.axis import Axis
from shoal.comm.mappings import reduce_from_region
from shoal.strategies.tensor.region import (
    Region,
    between_outside,
    column_outside,
    local_part,
    local_shard,
    shard_outside,
)


class _ColumnParallelConv:
    region: Region

    def forward(self: Any, x: Tensor) -> Tensor:
        weight, bias = local_shard(self.weight), local_shard(self.bias)
        if self.region.is_outside():
            dim = -1 - len(self.kernel_size)
            convolve = partial(self._conv_forward, weight=weight, bias=bias)
            return column_outside(convolve, x, self.region.axis, dim)
        y: Tensor = self._conv_forward(self.region.enter(x).full, weight, bias)
        return y


class ColumnParallelConv1d(_ColumnParallelConv, nn.Conv1d):
    """Computes this rank's shard of the channels."""


class ColumnParallelConv2d(_ColumnParallelConv, nn.Conv2d):
    """Computes this rank's shard of the channels."""


class ColumnParallelConv3d(_ColumnParallelConv, nn.Conv3d):
    """Computes this rank's shard of the channels."""


class _RowParallelConv:
    region: Region

    def forward(self: Any, x: Tensor) -> Tensor:
        if self.region.is_outside():
            x = shard_outside(x, self.region.axis, -1 - len(self.kernel_size))
        partial_sum = self._conv_forward(x, local_shard(self.weight), None)
        y = reduce_from_region(partial_sum, self.region.axis)
        if self.bias is None:
            return y
        # Added after the sum, so that it counts once; (channels, 1, ...) for the image's dims.
        bias = local_part(self.bias).to(y.dtype)
        output: Tensor = y + bias.view(-1, *[1] * len(self.kernel_size))
        return output


class RowParallelConv1d(_RowParallelConv, nn.Conv1d):
    """Takes this rank's shard of the channels; the output is replicated."""


class RowParallelConv2d(_RowParallelConv, nn.Conv2d):
    """Takes this rank's shard of the channels; the output is replicated."""


class RowParallelConv3d(_RowParallelConv, nn.Conv3d):
    """Takes this rank's shard of the channels; the output is replicated."""


class _GroupedConv:
    """Convolution in groups of channels, such as a depthwise one; each rank has some groups."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if self.region.is_outside():
            return between_outside(self._on_shard, x, self)
        y: Tensor = self._on_shard(x)
        return y

    def _on_shard(self: Any, x: Tensor) -> Tensor:
        y: Tensor = self._conv_forward(x, local_shard(self.weight), local_shard(self.bias))
        return y


class ShardedGroupedConv1d(_GroupedConv, nn.Conv1d):
    """Takes and computes this rank's shard of the channels."""


class ShardedGroupedConv2d(_GroupedConv, nn.Conv2d):
    """Takes and computes this rank's shard of the channels."""


class ShardedGroupedConv3d(_GroupedConv, nn.Conv3d):
    """Takes and computes this rank's shard of the channels."""


class _ShardedBatchNorm:
    """torch's BatchNorm on DTensors; the steps are those of nn.modules.batchnorm._BatchNorm."""

    def forward(self: Any, x: Tensor) -> Tensor:
        self._check_input_dim(x)
        if self.region.is_outside():
            return between_outside(self._on_shard, x, self)
        y: Tensor = self._on_shard(x)
        return y

    def _on_shard(self: Any, x: Tensor) -> Tensor:
        # torch replaces None by an average of all batches: 1 / their number.
        factor = 0.0 if self.momentum is None else self.momentum
        updates_statistics = self.training and self.track_running_stats
        if updates_statistics and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        mean, variance = None, None
        if updates_statistics or not self.training:
            mean = local_shard(self.running_mean)
            variance = local_shard(self.running_var)
        uses_batch_statistics = self.training or self.running_mean is None
        return F.batch_norm(
            x,
            mean,
            variance,
            local_shard(self.weight),
            local_shard(self.bias),
            uses_batch_statistics,
            factor,
            self.eps,
        )


class ShardedBatchNorm1d(_ShardedBatchNorm, nn.BatchNorm1d):
    """Normalizes this rank's shard of the channels."""


class ShardedBatchNorm2d(_ShardedBatchNorm, nn.BatchNorm2d):
    """Normalizes this rank's shard of the channels."""


class ShardedBatchNorm3d(_ShardedBatchNorm, nn.BatchNorm3d):
    """Normalizes this rank's shard of the channels."""


class ShardedGroupNorm(nn.GroupNorm):
    """Normalizes this rank's shard of the groups of channels."""

    axis: Axis
    dim: int
    region: Region

    def forward(self, x: Tensor) -> Tensor:
        if self.region.is_outside():
            return between_outside(self._on_shard, x, self)
        return self._on_shard(x)

    def _on_shard(self, x: Tensor) -> Tensor:
        local_groups = self.num_groups // self.axis.size
        weight = local_shard(self.weight)
        return F.group_norm(x, local_groups, weight, local_shard(self.bias), self.eps)
