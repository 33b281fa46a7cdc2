"""One step of a local model: the passes of a batch, then gradients and totals as global means.

passes ──> rescale by the count ──> judge, unscale (fp16) ──> add earlier calls
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor

from shoal.comm.mesh import Mesh
from shoal.run.checks import check_some_gradient
from shoal.run.gradients import add_gradients, detach_gradients
from shoal.run.guards import Guards
from shoal.run.nonfinite_steps import NonfiniteSteps
from shoal.run.parameter_hooks import ParameterHooks
from shoal.run.tracing import Tracing
from shoal.strategies import base, extras, local_step
from shoal.watchdog.progress_word import Phase
from shoal.watchdog.progress_writer import own_progress


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


class TrainingStep:
    """Computes `forward_backward` of one local model.

    Args:
        tracing: None without a trace.
        first_pass: a context of the passes of the first step.
        hooks: of the script on parameters.
    """

    def __init__(
        self,
        local_model: base.LocalModel,
        mesh: Mesh,
        tracing: Tracing | None,
        guards: Guards,
        nonfinite_steps: NonfiniteSteps,
        first_pass: AbstractContextManager[None],
        hooks: ParameterHooks,
    ) -> None:
        self._guards = guards
        self._nonfinite_steps = nonfinite_steps
        self._local_model = local_model
        self._tracing = tracing
        self._around_passes = first_pass
        self._hooks = hooks
        self._has_stepped = False
        self._progress = own_progress()
        # The sum over ranks for counts; None where each rank steps by itself.
        synchronous = mesh.data.size > 1 and local_model.strategy_state.is_synchronous
        self._sum_counts = mesh.data.all_reduce if synchronous else None

    def forward_backward(self, batch: base.LocalBatch) -> StepOutput:
        """Leave the global mean gradients in `.grad`. Collective."""
        self._progress.begin_step(shapes_of(batch))
        self._guards.before_step()
        batch = batch._replace(sum_counts=self._sum_counts, note_loss=self._nonfinite_steps.begin())
        self._hooks.check()
        earlier = detach_gradients(self._local_model)
        around, self._around_passes = self._around_passes, nullcontext()
        with self._guards.in_step(), around:
            result = self._compute(batch)
        if not self._has_stepped:
            check_some_gradient(self._local_model)
            self._has_stepped = True
        totals = result.step_totals
        # None on a device, where reading them would wait for the step.
        numbers = totals.tolist() if totals.is_cpu else None
        size = batch.global_batch_size
        local_step.rescale_by_count(self._local_model, result, size, numbers)
        self._nonfinite_steps.judge(totals, numbers, earlier.values())
        add_gradients(earlier)
        extra = extras.join(result.extras, totals) if result.extras else None
        loss = local_step.mean_loss(result, size, numbers)
        self._guards.after_step()
        self._progress.enter(Phase.BETWEEN)
        return StepOutput(loss, extra, totals)

    def _compute(self, batch: base.LocalBatch) -> base.StepResult:
        if self._tracing is not None:
            return self._tracing.run_passes(self._local_model, batch)
        return local_step.forward_backward(self._local_model, batch)


def shapes_of(batch: base.LocalBatch) -> tuple[object, ...]:
    """Return the shapes of the tensors of a batch, which decide if something is compiled anew."""
    values = (*batch.args, *batch.kwargs.values()) if batch.kwargs else batch.args
    return tuple(value.shape for value in values if isinstance(value, Tensor))
