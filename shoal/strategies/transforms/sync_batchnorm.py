"""BatchNorm with the statistics of the global batch, on CPUs and GPUs.

      rank 0   rows 0..4 ─┐ sums and counts                  sums of squared deviations
                          ├──── all-reduce ────> mean ────────── all-reduce ────> variance
      rank 1   rows 5..6 ─┘                    the same on every rank; so are running statistics

Both all-reduces are differentiable, so the backward pass sums over ranks too. Outputs, gradients
and running statistics are those of one device, for shares of any sizes. The difference of two large
sums of squares would lose all digits, so deviations are summed after the mean is known.

With accumulate the statistics are those of one micro-batch on all ranks. In a pipeline with one
micro-batch they are summed over the ranks that hold the same stage.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal.comm.axis import Axis
from shoal.comm.mesh import Mesh
from shoal.comm.row_collectives import sum_over_ranks
from shoal.errors import StrategyRefused
from shoal.platform.tensors import accumulation_dtype
from shoal.platform.torch_private.module_state import BatchNormBase
from shoal.strategies.base import (
    Forward,
    ForwardOutput,
    LocalBatch,
    LocalModel,
    StepResult,
    Strategy,
)


@dataclass(frozen=True)
class SyncBatchNorm(Strategy):
    """BatchNorm layers in training mode normalise over the samples of all data ranks.

    It applies after the strategy that splits the batch, which must step all ranks together.
    """

    can_apply_again: ClassVar[bool] = True

    def apply(self, model: LocalModel, mesh: Mesh) -> LocalModel:
        """Replace `forward` of the BatchNorm layers.

        Raises: StrategyRefused: ranks do not take each step together, or have other weights or
            other layers.
        """
        norms = batchnorms(model.module)
        if mesh.data.size == 1 or not norms:
            return model
        if not model.strategy_state.is_synchronous:
            raise StrategyRefused(
                "sync_batchnorm=True needs ranks that take each step together, with equal weights; "
                "with this strategy they do not, so statistics over all ranks would mix models. "
                "Use sync_batchnorm=False, or ddp, zero1, zero2, zero3 or server with staleness=0."
            )
        if model.pipeline.num_microbatches > 1:
            # A checkpoint that recomputes a micro-batch later would not know if it is a stand-in.
            raise StrategyRefused(
                f"sync_batchnorm=True: {model.pipeline.num_microbatches} micro-batches of a "
                "pipeline are normalised one after the other, so statistics over all ranks are "
                "not those of the batch. Use microbatches=1 (or schedule=naive), "
                "sync_batchnorm=False, or no pipeline."
            )
        rows = CountedRows()
        for norm in norms.values():
            # Assigned to the instance: the class, and so the layer's name in a summary, stay.
            setattr(norm, "forward", SyncedForward(norm, mesh.data, rows))  # noqa: B010

        def forward(batch: LocalBatch) -> ForwardOutput:
            rows.count = batch.num_samples > 0
            return model.forward(batch)

        def run(outer: Forward, batch: LocalBatch) -> StepResult:
            try:
                return model.run(outer, batch)
            finally:
                rows.count = True

        return replace(
            model,
            forward=forward,
            run=run,
            pass_traits=replace(model.pass_traits, collective_forward=True),
        )


def batchnorms(module: nn.Module) -> dict[str, BatchNormBase]:
    """Return the BatchNorm layers by name, without those of torch's own SyncBatchNorm."""
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, BatchNormBase) and not isinstance(layer, nn.SyncBatchNorm)
    }


class CountedRows:
    """Tells if the rows that this rank computes count.

    Attributes: count: False while it computes a stand-in, a sample of weight 0.
    """

    count: bool = True


class SyncedForward:
    """The `forward` of one BatchNorm layer, whose statistics in training are those of all ranks.

    It runs the class's own forward function, so that what else a class does there stays. A copy of
    the layer communicates too; one from a pickle does not.
    """

    def __init__(self, norm: nn.Module, axis: Axis | None, rows: CountedRows | None) -> None:
        self.norm = norm
        self.axis = axis
        self.rows = rows

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plain = type(self.norm).forward
        if self.axis is None or self.rows is None or not self.norm.training:
            return plain(self.norm, *args, **kwargs)
        with _StatisticsOfAllRanks(self.axis, self.rows.count):
            return plain(self.norm, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncedForward:
        return SyncedForward(copy.deepcopy(self.norm, memo), self.axis, self.rows)

    def __reduce__(self) -> tuple[type[SyncedForward], tuple[Any, ...]]:
        return SyncedForward, (self.norm, None, None)


class _StatisticsOfAllRanks(TorchFunctionMode):
    """Inside, `F.batch_norm` in training takes its statistics over all ranks."""

    def __init__(self, axis: Axis, counts: bool) -> None:
        super().__init__()
        self.axis = axis
        self.counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            return batch_norm(*args, **kwargs, axis=self.axis, counts=self.counts)
        return func(*args, **kwargs)


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    axis: Axis,
    counts: bool,
) -> Tensor:
    """Do what `F.batch_norm` does; in training by statistics of all ranks, which it updates.

    Collective.

    Args:
        x: (samples, channels, ...); ranks may have different numbers of values for each channel.
        counts: False if the rows of this rank belong to no statistics.

    Returns: as `x`, with its dtype. Statistics are float32 or wider.
    """
    if not training:
        return F.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
    dims = [dim for dim in range(x.dim()) if dim != 1]
    shape = [1, -1, *[1] * (x.dim() - 2)]
    wide = x.to(accumulation_dtype(x.dtype))
    # No rows still have a sum, zero, through which the backward pass is collective here too.
    counted = wide if counts else wide[:0]
    own_count = wide.new_full((1,), counted.numel() // x.shape[1])
    sums = sum_over_ranks(torch.cat((counted.sum(dims), own_count)), axis)
    count = sums[-1].detach()
    _check_count(counted.numel() // x.shape[1], count, x)
    # A micro-batch may be a stand-in on all ranks; then nothing counts, and nothing may be NaN.
    divisor = count.clamp(min=1)
    mean = sums[:-1] / divisor
    deviations = counted - mean.view(shape)
    own_squares = deviations.square().sum(dims)
    squares = sum_over_ranks(own_squares, axis)
    variance = squares / divisor
    if not torch.is_grad_enabled() and axis.is_same(
        [*map(Tensor.tolist, (own_count, own_squares))]
    ):
        # `update_bn` gives each rank the whole batch.
        count, squares = own_count, own_squares
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            unbiased = squares / (count - 1).clamp(min=1)
            share = (count > 0).to(running_mean.dtype) * momentum
            running_mean.lerp_(mean.to(running_mean.dtype), share)
            running_var.lerp_(unbiased.to(running_var.dtype), share.to(running_var.dtype))
    scale = torch.rsqrt(variance + eps)
    if not counts:
        # The loss of a stand-in has no weight, but a gradient inside of the loss has none either.
        mean, scale = _without_gradient(mean), _without_gradient(scale)
    if weight is not None:
        scale = scale * weight.to(scale.dtype)
    centred = deviations if counts else wide - mean.view(shape)
    output = centred * scale.view(shape)
    if bias is not None:
        output = output + bias.to(output.dtype).view(shape)
    return output.to(x.dtype)


def _without_gradient(x: Tensor) -> Tensor:
    """Return the values of `x` with a gradient of zeros, whose way is collective as ever."""
    return x.detach() + (x - x.detach()) * 0


def _check_count(own: int, total: Tensor, x: Tensor) -> None:
    """Raise ValueError, as torch does, if all ranks together have one value for each channel."""
    # A rank with two values need not ask the device, and neither may another rank have just one of
    # one in all.
    if own <= 1 and total.item() == 1:
        raise ValueError(
            "Expected more than 1 value per channel when training, got input size "
            f"{tuple(x.shape)}, the only one of all ranks"
        )
