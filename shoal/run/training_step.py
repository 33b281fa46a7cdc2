"""One step of a local model: the passes of a batch, then gradients and totals as global means.

passes ──> rescale by the count ──> judge, unscale (fp16) ──> add earlier calls

And operations on all gradients between steps: clip them, gather them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor, nn

from shoal.comm.assembly import gather_named_tensors, unshared
from shoal.comm.mesh import Mesh
from shoal.comm.norm import full_tensor
from shoal.run.checks import check_some_gradient
from shoal.run.guards import Guards
from shoal.run.nonfinite_steps import NonfiniteSteps
from shoal.run.parameter_hooks import ParameterHooks
from shoal.run.tracing import Tracing
from shoal.strategies import base, extras, local_step
from shoal.strategies.base import LocalModel
from shoal.strategies.local_step import gradient_norm, scale_gradients
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


def detach_gradients(local_model: LocalModel) -> dict[nn.Parameter, Tensor]:
    """Return copies of the gradients of earlier calls, and set each `.grad` to None.

    A strategy reduces all that lies in `.grad`, and the gradients of earlier calls are global means
    already. So they wait outside until `add_gradients`. The result is empty after `zero_grad()`.
    """
    # Copies, because a gradient may be a view of a bucket that this call fills again.
    earlier = {
        p: p.grad.clone() for p in local_model.trainable_params.values() if p.grad is not None
    }
    for parameter in earlier:
        parameter.grad = None
    return earlier


def add_gradients(earlier: Mapping[nn.Parameter, Tensor]) -> None:
    """Add the gradients that `detach_gradients` returned to those of this call."""
    for parameter, gradient in earlier.items():
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def clip_gradients(local_model: LocalModel, max_norm: float) -> Tensor:
    """Scale all gradients so that their global norm is at most `max_norm`. Collective.

    Returns: the norm before, a scalar tensor.
    """
    if local_model.remote_optimizer is not None:
        norm = local_model.remote_optimizer.norm()
    else:
        gradients = {n: p.grad for n, p in local_model.trainable_params.items()}
        norm = gradient_norm(local_model, {n: g for n, g in gradients.items() if g is not None})
    # The same small constant as in torch.nn.utils.clip_grad_norm_: no division by zero.
    scale_gradients(local_model, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def gather_gradients(local_model: LocalModel) -> dict[str, Tensor | None]:
    """Return the full gradient of every trainable parameter of the full model. Collective.

    A parameter without a gradient has None. The others are copies.
    """
    if local_model.remote_optimizer is not None:
        return local_model.remote_optimizer.gradients()
    stage_gradients = {
        name: None if parameter.grad is None else full_tensor(parameter.grad)
        for name, parameter in local_model.trainable_params.items()
    }
    full = gather_named_tensors(local_model.pipeline.axis, stage_gradients)
    held = (p.grad for p in local_model.trainable_params.values())
    return unshared(full, (gradient for gradient in held if gradient is not None))
