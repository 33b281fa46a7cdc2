"""Convolutions and norms that are divided along channels: the pairs of `linear.py`, for images.

    x ──> column ──> BatchNorm ──> ReLU ──> row ──> sum       statistics are those of one channel,
                                                              so they need no communication

DTensor's convolution is no alternative: with a weight that is sharded on output channels, it
declares its output replicated, at half the channels, without an error (torch 2.13,
pytorch#186129).
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from shoal.comm.axis import Axis
from shoal.comm.mappings import reduce_from_region
from shoal.strategies.tensor.candidates import CONVOLUTIONS
from shoal.strategies.tensor.region import (
    Region,
    local_part,
    local_shard,
)

ModuleClasses = dict[type[nn.Module], type[nn.Module]]


class _ColumnParallelConv:
    """Computes this rank's shard of the channels."""

    region: Region

    def forward(self: Any, x: Tensor) -> Tensor:
        y: Tensor = self._conv_forward(
            self.region.enter(x).full, local_shard(self.weight), local_shard(self.bias)
        )
        return y


class _RowParallelConv:
    """Takes this rank's shard of the channels; the output is replicated."""

    region: Region

    def forward(self: Any, x: Tensor) -> Tensor:
        self.region.check_inside()
        partial_sum = self._conv_forward(x, local_shard(self.weight), None)
        y = reduce_from_region(partial_sum, self.region.axis)
        if self.bias is None:
            return y
        # Added after the sum, so that it counts once; (channels, 1, ...) for the image's dims.
        bias = local_part(self.bias).to(y.dtype)
        output: Tensor = y + bias.view(-1, *[1] * len(self.kernel_size))
        return output


class _GroupedConv:
    """Convolution in groups of channels, such as a depthwise one; each rank has some groups."""

    region: Region

    def forward(self: Any, x: Tensor) -> Tensor:
        self.region.check_inside()
        y: Tensor = self._conv_forward(x, local_shard(self.weight), local_shard(self.bias))
        return y


class _ShardedBatchNorm:
    """torch's BatchNorm on DTensors; the steps are those of nn.modules.batchnorm._BatchNorm."""

    region: Region

    def forward(self: Any, x: Tensor) -> Tensor:
        self._check_input_dim(x)
        self.region.check_inside()
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


class ShardedGroupNorm(nn.GroupNorm):
    """Normalizes this rank's shard of the groups of channels."""

    axis: Axis
    region: Region

    def forward(self, x: Tensor) -> Tensor:
        self.region.check_inside()
        local_groups = self.num_groups // self.axis.size
        weight = local_shard(self.weight)
        return F.group_norm(x, local_groups, weight, local_shard(self.bias), self.eps)


def _classes(mixin: type, *kinds: type[nn.Module]) -> ModuleClasses:
    """Return for each kind of module a class that computes as `mixin` says."""
    name = mixin.__name__.removeprefix("_")
    return {kind: type(f"{name} of {kind.__name__}", (mixin, kind), {}) for kind in kinds}


COLUMN_CLASSES = _classes(_ColumnParallelConv, *CONVOLUTIONS)
ROW_CLASSES = _classes(_RowParallelConv, *CONVOLUTIONS)
BETWEEN_CLASSES: ModuleClasses = {
    **_classes(_GroupedConv, *CONVOLUTIONS),
    **_classes(_ShardedBatchNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    nn.GroupNorm: ShardedGroupNorm,
}
