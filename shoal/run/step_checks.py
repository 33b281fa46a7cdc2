"""The checks of a step, on one seam: all that looks at a script's steps, and changes none of them.

      run.forward_backward(compute_loss, *batch)
        │
        begin     the loop's part is over: were weights written that would be lost?
        │         ── the engine's batch of this rank ──
        before    the batch: has the loop mixed samples of one rank? the loss: is it a mean?
        │
        passes    around the passes of the engine: guards, and the notes of the first passes
        │
        after     what came back beside the loss: is it of one rank's samples?

Without guards all but the notes and the context of the passes is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from shoal.run.first_step_notes import noting_first_step
from shoal.run.loop_loss import LoopLoss
from shoal.run.prepared import Prepared
from shoal.run.row_gathering import RowGathering
from shoal.run.step import StepOutput
from shoal.run.step_trials import StepTrials
from shoal.strategies import loss_terms
from shoal.strategies.base import ComputedLoss, ComputeLoss, LocalBatch

OWN_VALUES = (
    "note: what compute_loss returns beside the loss is of this rank's samples alone, and so is a "
    "number computed from it, such as an accuracy. shoal.summed(x) in its place comes back summed "
    "over all ranks: hits and samples, for example."
)


class StepChecks:
    """Checks each step of a run."""

    def __init__(self, prepared: Prepared, gathering: RowGathering, loop: LoopLoss) -> None:
        self._prepared = prepared
        self._guards = prepared.guards
        self._gathering = gathering
        self._loop = loop
        self._trials = StepTrials(prepared)
        self._has_noted = False
        self._has_looked = False

    def begin(self) -> None:
        """End what the loop does before a step.

        Raises: UsageError: weights were written that would be lost.
        """
        if self._guards.enabled:
            self._guards.check_weights()
            self._prepared.watch.end()

    def before(self, batch: LocalBatch, reduction: str) -> None:
        """Check a batch and its loss, before they reach the engine. Collective.

        Raises: UsageError: the loop has mixed samples of one rank; the loss is no mean over samples
            where a batch is computed in parts.
        """
        if not self._guards.enabled:
            return
        loss = batch.step.compute_loss
        is_computed = isinstance(loss, ComputedLoss)
        calls = self._loop.take_first_calls() if is_computed else None
        if reduction != "rows":
            self._prepared.watch.skip()
            return
        if is_computed:
            self._loop.check(batch)
            if calls is not None:
                self._trials.called_models(calls, batch)
            return
        self._prepared.watch.judge(batch)
        if self._gathering.gathers_before(loss):
            return  # it says itself that it couples samples
        if self._trials.has_tried(loss):
            self._trials.later_step(batch)
        else:
            self._trials.first_step(batch)

    @contextmanager
    def passes(self, loss: ComputeLoss) -> Iterator[None]:
        """Guard the passes of a step within. Collective.

        Raises: UsageError: weights or optimizer state were written that would be lost.
        """
        if self._guards.enabled:
            self._guards.before_step()
        notes: AbstractContextManager[None] = nullcontext()
        if not self._has_noted:
            notes = noting_first_step(self._prepared, isinstance(loss, ComputedLoss))
        self._has_noted = True
        with self._guards.phase, notes:
            yield
        if self._trials.in_first_step:
            self._trials.after_passes()
        if self._guards.enabled:
            self._guards.after_step()

    def after(self, output: StepOutput) -> None:
        """Note once that values beside the loss are of this rank's samples."""
        if not output.given or self._has_looked:
            return
        self._has_looked = True  # at one step: a function returns the same kinds each time
        if self._prepared.mesh.data.size > 1 and loss_terms.has_own(output.given[0].value):
            self._prepared.announce(OWN_VALUES)
