"""One step of a prepared model: the passes of a batch, then gradients and totals as global means.

batch sizes ──> passes ──> rescale by the count ──> unscale (fp16) ──> add earlier calls
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from shoal.run.batch_size import BatchSizes
from shoal.run.gradients import add_gradients, detach_gradients
from shoal.run.guards import Guards
from shoal.run.loss_scaling import LossScaleGuard
from shoal.run.optimizer_in_backward import OptimizerInBackward, require_mean
from shoal.run.tracing import Tracing
from shoal.strategies import base, local_step


class TrainingStep:
    """Computes `forward_backward` of one prepared model.

    Args:
        optimizer_in_backward: steps parameters inside the backward pass; None if the user's
            `optimizer.step()` does.
        loss_scale_guard: None without fp16.
        tracing: None without a trace.

    Attributes:
        guards: of the prepared model; they are told when passes begin and end.
    """

    def __init__(
        self,
        local_model: base.LocalModel,
        batch_sizes: BatchSizes,
        optimizer_in_backward: OptimizerInBackward | None,
        loss_scale_guard: LossScaleGuard | None,
        tracing: Tracing | None,
        guards: Guards,
    ) -> None:
        self.guards = guards
        self.optimizer_in_backward = optimizer_in_backward
        self._local_model = local_model
        self._batch_sizes = batch_sizes
        self._loss_scale_guard = loss_scale_guard
        self._tracing = tracing

    def forward_backward(
        self,
        loss_fn: base.LossFunction,
        batch: tuple[Any, ...],
        measure: base.Measure | None,
        stop_requested: bool,
    ) -> tuple[Tensor, Tensor]:
        """Leave the global mean gradients in `.grad`. Collective.

        Returns: the global mean loss, a detached scalar; and the totals of the step over all ranks.
        """
        self.guards.before_step()
        *inputs, target = batch
        loss_fn, num_samples, global_batch_size = self._batch_sizes.resolve(loss_fn, batch)
        if self.optimizer_in_backward is not None:
            loss_fn = require_mean(loss_fn)
        local_batch = base.LocalBatch(
            loss_fn, tuple(inputs), target, num_samples, global_batch_size, measure, stop_requested
        )
        result, earlier = self._run_passes(local_batch)
        local_step.rescale_by_count(self._local_model, result, global_batch_size)
        if self._loss_scale_guard is not None:
            self._loss_scale_guard.unscale(earlier)
        add_gradients(earlier)
        totals = result.step_totals
        if result.is_sum_and_count:
            divisor = local_step.count_or_one(totals)
        else:
            divisor = local_step.cached_scalar_tensor(
                global_batch_size, totals.dtype, totals.device
            )
        loss = totals[base.LOSS_SUM] / divisor
        self.guards.after_step(loss)
        return loss, totals

    def _run_passes(
        self, batch: base.LocalBatch
    ) -> tuple[base.StepResult, dict[nn.Parameter, Tensor]]:
        """Run all passes of a batch. Return their result, and the gradients of earlier calls."""
        earlier: dict[nn.Parameter, Tensor] = {}
        stepping: AbstractContextManager[None] = nullcontext()
        if self.optimizer_in_backward is None:
            earlier = detach_gradients(self._local_model)
        else:
            stepping = self.optimizer_in_backward.stepping()
        with self.guards.in_step(), stepping:
            if self._tracing is None:
                result = local_step.forward_backward(self._local_model, batch)
            else:
                result = self._tracing.run_passes(self._local_model, batch)
        return result, earlier
