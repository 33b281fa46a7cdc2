"""One step of a local model: the passes of a batch, then gradients and totals as global means.

passes ──> rescale by the count ──> unscale (fp16) ──> add earlier calls
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor, nn

from shoal.comm.mesh import Mesh
from shoal.run.buffer_notes import noting_buffers
from shoal.run.checks import check_some_gradient
from shoal.run.gradients import add_gradients, detach_gradients
from shoal.run.guards import Guards
from shoal.run.loss_scaling import LossScaleGuard
from shoal.run.nonfinite_steps import NonfiniteSteps
from shoal.run.optimizer_in_backward import OptimizerInBackward, require_mean
from shoal.run.random_notes import noting_draws
from shoal.run.tracing import Tracing
from shoal.strategies import base, extras, local_step


class StepOutput(NamedTuple):
    """The result of a step for the training loop.

    Attributes:
        loss: the global mean loss, a detached scalar.
        extra: values beside the loss, for this rank's samples; None if there are none.
        totals: (TOTALS_LENGTH,), of the step over all ranks.
    """

    loss: Tensor
    extra: Any
    totals: Tensor


class FirstStepNotes(NamedTuple):
    """Takers of notes about the first step; None where there is nothing to tell.

    Attributes:
        announce_draws: of random numbers that are not those of one device.
        announce_buffers: of buffers that are not.
        in_micro_batches: a rank computes its share of a batch in several passes.
    """

    announce_draws: Callable[[str], None] | None = None
    announce_buffers: Callable[[str], None] | None = None
    in_micro_batches: bool = False


class TrainingStep:
    """Computes `forward_backward` of one local model.

    Args:
        optimizer_in_backward: steps parameters inside the backward pass; None if the user's
            `optimizer.step()` does.
        loss_scale_guard: None without fp16.
        tracing: None without a trace.
        guards: of the prepared models; they are told when passes begin and end.
        nonfinite_steps: judges each step.
        notes: who is told what makes the first step differ from one device's.
    """

    def __init__(
        self,
        local_model: base.LocalModel,
        mesh: Mesh,
        optimizer_in_backward: OptimizerInBackward | None,
        loss_scale_guard: LossScaleGuard | None,
        tracing: Tracing | None,
        guards: Guards,
        nonfinite_steps: NonfiniteSteps,
        notes: FirstStepNotes,
    ) -> None:
        self._guards = guards
        self._nonfinite_steps = nonfinite_steps
        self.optimizer_in_backward = optimizer_in_backward
        self._local_model = local_model
        self._mesh = mesh
        self._loss_scale_guard = loss_scale_guard
        self._tracing = tracing
        self._notes = notes
        self._has_stepped = False

    def forward_backward(self, batch: base.LocalBatch) -> StepOutput:
        """Leave the global mean gradients in `.grad`. Collective."""
        self._guards.before_step()
        if self.optimizer_in_backward is not None:
            batch = batch._replace(compute_loss=require_mean(batch.compute_loss))
        batch = batch._replace(sum_counts=self._sum_counts())
        batch = self._nonfinite_steps.begin(batch)
        result, earlier = self._run_passes(batch)
        if not self._has_stepped and self.optimizer_in_backward is None:
            check_some_gradient(self._local_model)
            self._has_stepped = True
        local_step.rescale_by_count(self._local_model, result, batch.global_batch_size)
        if self._loss_scale_guard is not None:
            self._loss_scale_guard.unscale(earlier)
        self._nonfinite_steps.judge(result.step_totals, earlier.values())
        add_gradients(earlier)
        totals = result.step_totals
        extra = extras.join(result.extras, totals) if result.extras else None
        loss = _mean_loss(result, batch.global_batch_size)
        is_judged = self._nonfinite_steps.enabled or self._loss_scale_guard is not None
        self._guards.after_step(None if is_judged else loss)
        return StepOutput(loss, extra, totals)

    def _sum_counts(self) -> Any:
        """Return the sum over ranks for counts, or None where each rank steps by itself."""
        state = self._local_model.strategy_state
        if self._mesh.data.size == 1 or not state.is_synchronous:
            return None
        return self._mesh.data.all_reduce

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Announce what makes the first step differ from one device's. Collective."""
        notes, self._notes = self._notes, FirstStepNotes()
        module, mesh = self._local_model.module, self._mesh
        with ExitStack() as stack:
            if notes.announce_buffers is not None:
                stack.enter_context(
                    noting_buffers(module, mesh, notes.in_micro_batches, notes.announce_buffers)
                )
            if notes.announce_draws is not None:
                stack.enter_context(noting_draws(module, notes.announce_draws))
            yield

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
        noting = nullcontext() if self._has_stepped else self._noting()
        with self._guards.in_step(), stepping, noting:
            if self._tracing is None:
                result = local_step.forward_backward(self._local_model, batch)
            else:
                result = self._tracing.run_passes(self._local_model, batch)
        return result, earlier


def _mean_loss(result: base.StepResult, global_batch_size: int) -> Tensor:
    """Return the global mean loss, a scalar."""
    totals = result.step_totals
    if result.is_sum_and_count:
        return totals[base.LOSS_SUM] / local_step.count_or_one(totals)
    divisor = local_step.cached_scalar_tensor(global_batch_size, totals.dtype, totals.device)
    return totals[base.LOSS_SUM] / divisor
