"""Convolutions and norms in slices of channels: the pairs of `linear.py`, for images and signals.

    x ──> column ──> BatchNorm ──> ReLU ──> row ──> total       each channel's statistics are its own

DTensor's convolution is of no use here: with a weight that is sharded on output channels it labels
its output as whole, at half the channels, without an error (torch 2.13, pytorch#186129)."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from shoal.comm.axis import Axis
from shoal.comm.mappings import reduce_from_region
from shoal.strategies.tensor.region import Region, local_shard


class _ColumnParallelConv:
    region: Region

    def forward(self: Any, x: Tensor) -> Tensor:
        y: Tensor = self._conv_forward(
            self.region.entered(x).whole, local_shard(self.weight), local_shard(self.bias)
        )
        return y


class ColumnConv1d(_ColumnParallelConv, nn.Conv1d):
    """Gives this rank's slice of the channels."""


class ColumnConv2d(_ColumnParallelConv, nn.Conv2d):
    """Gives this rank's slice of the channels."""


class ColumnConv3d(_ColumnParallelConv, nn.Conv3d):
    """Gives this rank's slice of the channels."""


class _RowParallelConv:
    region: Region

    def forward(self: Any, x: Tensor) -> Tensor:
        y = reduce_from_region(
            self._conv_forward(x, local_shard(self.weight), None), self.region.axis
        )
        return (
            y
            if self.bias is None
            else y + local_shard(self.bias).to(y.dtype).view(-1, *[1] * len(self.kernel_size))
        )


class RowConv1d(_RowParallelConv, nn.Conv1d):
    """Takes this rank's slice of the channels; the outputs are whole."""


class RowConv2d(_RowParallelConv, nn.Conv2d):
    """Takes this rank's slice of the channels; the outputs are whole."""


class RowConv3d(_RowParallelConv, nn.Conv3d):
    """Takes this rank's slice of the channels; the outputs are whole."""


class _Grouped:
    """Groups of channels by themselves, such as each channel (depthwise): a rank has some of
    the groups.
    """

    def forward(self: Any, x: Tensor) -> Tensor:
        y: Tensor = self._conv_forward(x, local_shard(self.weight), local_shard(self.bias))
        return y


class GroupedConv1d(_Grouped, nn.Conv1d):
    """Takes and gives this rank's slice of the channels."""


class GroupedConv2d(_Grouped, nn.Conv2d):
    """Takes and gives this rank's slice of the channels."""


class GroupedConv3d(_Grouped, nn.Conv3d):
    """Takes and gives this rank's slice of the channels."""


class _Norm:
    def forward(self: Any, x: Tensor) -> Tensor:
        self._check_input_dim(x)
        factor = 0.0 if self.momentum is None else self.momentum
        keeps = self.training and self.track_running_stats
        if keeps and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else factor
        mean, variance = (
            (local_shard(self.running_mean), local_shard(self.running_var))
            if keeps or not self.training
            else (None,) * 2
        )
        by_batch = self.training or self.running_mean is None
        return F.batch_norm(
            x,
            mean,
            variance,
            local_shard(self.weight),
            local_shard(self.bias),
            by_batch,
            factor,
            self.eps,
        )


class SlicedBatchNorm1d(_Norm, nn.BatchNorm1d):
    """Normalises this rank's slice of the channels."""


class SlicedBatchNorm2d(_Norm, nn.BatchNorm2d):
    """Normalises this rank's slice of the channels."""


class SlicedBatchNorm3d(_Norm, nn.BatchNorm3d):
    """Normalises this rank's slice of the channels."""


class SlicedGroupNorm(nn.GroupNorm):
    """Normalises this rank's slice of the groups of channels."""

    axis: Axis

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(
            x,
            self.num_groups // self.axis.size,
            local_shard(self.weight),
            local_shard(self.bias),
            self.eps,
        )
