"""One step of a run: the batch as strategies see it, then the passes and the global means.

make_batch      the script's function and arguments ──> this rank's samples of the global batch
TrainingStep    passes ──> rescale by the count ──> judge, unscale (fp16) ──> add earlier calls

The checks of a step are in `step_checks.py`. Nothing here knows of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from inspect import unwrap
from typing import Any, NamedTuple

from torch import Tensor

from shoal.comm.axis import Axis
from shoal.comm.mesh import Mesh
from shoal.data.batch_shards import row_window
from shoal.data.tree_map import are_tensors, mark_sample_lists
from shoal.run.batch_size import BatchSizes, StepSizes
from shoal.run.checks import check_some_gradient
from shoal.run.gradients import add_gradients, detach_gradients
from shoal.run.nonfinite_steps import NonfiniteSteps
from shoal.run.parameter_hooks import ParameterHooks
from shoal.run.tracing import Tracing
from shoal.strategies import base, local_step, loss_terms
from shoal.watchdog.progress_word import Phase
from shoal.watchdog.progress_writer import own_progress


def make_batch(
    compute_loss: base.ComputeLoss,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    sizes: BatchSizes,
    mesh: Mesh,
    accumulate: int,
    rows: int | None,
) -> base.LocalBatch:
    """Return the local batch of a step; `Run.forward_backward` explains the arguments.

    Raises: UsageError: the sizes do not fit.
    """
    arguments = (*args, *kwargs.values()) if kwargs else args
    if not are_tensors(arguments):
        is_divided = mesh.size * accumulate > 1
        args, kwargs = mark_sample_lists((args, kwargs), sizes.hold_samples, is_divided)
        arguments = (*args, *kwargs.values())
    return batch_of_size(compute_loss, args, kwargs, sizes.resolve(arguments, rows), mesh.data)


def batch_of_size(
    compute_loss: base.ComputeLoss,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    size: StepSizes,
    data: Axis,
) -> base.LocalBatch:
    """Return the local batch of so many samples on this rank and on all."""
    step = base.Step(compute_loss, size.global_rows, size.is_known)
    first_row = row_window(size.global_rows, data.rank, data.size).start if data.size > 1 else 0
    return base.LocalBatch(step, args, kwargs, size.rows, first_row)


def weighted_by_rank(batch: base.LocalBatch, ranks: int) -> base.LocalBatch:
    """Return a batch whose mean counts as much as that of any other rank with samples."""
    size = batch.step.global_batch_size
    weight = size / (min(ranks, size) * max(batch.num_samples, 1))
    # Each mean has its weight, so the global size may be unknown; but not to a loop that draws.
    is_known = batch.step.sizes_known or not isinstance(batch.step.compute_loss, base.ComputedLoss)
    return batch._replace(step=batch.step._replace(sizes_known=is_known, loss_weight=weight))


def code_of(function: base.ComputeLoss) -> object:
    """Return the code object, which all lambdas and partials share that a line has made."""
    while isinstance(function, partial):
        function = function.func
    function = unwrap(getattr(function, "__func__", function))
    return getattr(function, "__code__", type(function))


class StepOutput(NamedTuple):
    """The result of a step for the training loop.

    Attributes:
        loss: the global mean loss, a detached scalar.
        extra: values beside the loss, for this rank's samples; None if there are none.
        totals: (TOTALS_LENGTH,), of the step over all ranks.
        given: what the function returned beside the loss, of each micro-batch.
    """

    loss: Tensor
    extra: Any
    totals: Tensor
    given: Sequence[base.Extra] = ()


class TrainingStep:
    """Computes `forward_backward` of one local model.

    Args:
        tracing: None without a trace.
        hooks: of the script on parameters.
    """

    def __init__(
        self,
        local_model: base.LocalModel,
        mesh: Mesh,
        tracing: Tracing | None,
        nonfinite_steps: NonfiniteSteps,
        hooks: ParameterHooks,
    ) -> None:
        self._nonfinite_steps = nonfinite_steps
        self._local_model = local_model
        self._tracing = tracing
        self._hooks = hooks
        self._has_stepped = False
        self._progress = own_progress()
        # The sum over ranks for counts; None where each rank steps by itself.
        synchronous = mesh.data.size > 1 and local_model.strategy_state.is_synchronous
        self._sum_counts = mesh.data.all_reduce if synchronous else None

    def forward_backward(self, batch: base.LocalBatch) -> StepOutput:
        """Leave the global mean gradients in `.grad`. Collective."""
        given = (*batch.args, *batch.kwargs.values()) if batch.kwargs else batch.args
        # The shapes decide if something is compiled anew.
        self._progress.begin_step(tuple(v.shape for v in given if isinstance(v, Tensor)))
        note_loss = self._nonfinite_steps.begin()
        step = batch.step._replace(sum_counts=self._sum_counts, note_loss=note_loss)
        self._hooks.check()
        earlier = detach_gradients(self._local_model)
        passes = self._tracing.run_passes if self._tracing else local_step.forward_backward
        result = passes(self._local_model, batch._replace(step=step))
        if not self._has_stepped:
            check_some_gradient(self._local_model)
            self._has_stepped = True
        totals = result.step_totals
        # None on a GPU, where reading them would synchronise.
        numbers = totals.tolist() if totals.is_cpu else None
        size = step.global_batch_size
        local_step.rescale_by_count(self._local_model, result, size)
        self._nonfinite_steps.judge(totals, numbers, earlier.values())
        add_gradients(earlier)
        extra = loss_terms.join(result.extras, totals) if result.extras else None
        loss = local_step.mean_loss(result, size, numbers)
        self._progress.enter(Phase.BETWEEN)
        return StepOutput(loss, extra, totals, result.extras)
