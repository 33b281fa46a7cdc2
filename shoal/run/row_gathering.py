"""`Run.gather` and `Run.rows`: the rows of all ranks, for losses that couple samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from shoal.comm.row_collectives import count_rows, gather_rows
from shoal.errors import StrategyRefused, UsageError
from shoal.run.gather_passes import MicrobatchGathering
from shoal.run.prepared import Prepared
from shoal.strategies import base
from shoal.strategies.local_step import split_microbatches
from shoal.strategies.transforms.accumulate import accumulated
from shoal.trial import end_trial

OTHER_WEIGHTS = (
    "run.gather: the ranks have different weights between two averages or pushes here, so the "
    "gathered rows would be outputs of different models. Use ddp, zero1, zero2, zero3, or server "
    "with staleness=0."
)
STAGES = (
    "run.gather couples the samples of a global batch; the stages of a pipeline see one "
    "micro-batch after the other, so all rows are gathered before the step. That was not possible: "
    "the compute_loss of the first step must gather already, and must not read from an iterator. "
    "Or use a strategy without pipeline, such as zero3."
)
MICROBATCHES = (
    "run.gather couples the samples of a global batch; accumulate={parts} makes {parts} batches of "
    "it, so all rows are gathered before the step. That was not possible: compute_loss must gather "
    'in its first step already and must not read from an iterator, and draws="global" draws for '
    "one batch at a time. Or use accumulate=1."
)
VIEWS = (
    "note: run.gather was given {rows} rows, and this rank has {samples} samples. Rows come in the "
    "order of ranks. Where they are views of the batch, one behind the other as torch.cat puts "
    "them, one device has all first views before the second ones: run.gather(x, views={views})."
)
EVALUATION = (
    "run.gather inside of evaluate: ranks take whole batches in turn there, and some have none "
    "left. Return the sums of each batch; or gather in a loop of your own, over a prepared loader."
)


class RowGathering:
    """Gathers rows along the data axis, without those of stand-ins."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._mesh = prepared.mesh
        self._watch = prepared.watch
        self._accumulate = prepared.settings.accumulate
        self._microbatches = MicrobatchGathering(prepared.mesh, prepared.models)
        self._inside_step = False
        self._evaluates = False
        self._plans = False
        self._has_planned_gather = False
        # The last batch on this rank is a stand-in, which has no rows.
        self._stands_in = False
        self._rows: slice | None = None
        self._samples = 0
        self._views: dict[str, int] = {}

    def gather_views(self, x: Tensor, views: int, local_model: base.LocalModel) -> Tensor:
        """Return the rows of all data ranks; `Run.gather` explains it. Collective."""
        if views > 1:
            return torch.cat([self._gather(view, local_model) for view in x.chunk(views)])
        gathered = self._gather(x, local_model)
        self._note_views(len(x), local_model)
        return gathered

    def _note_views(self, rows: int, local_model: base.LocalModel) -> None:
        """Note that rows may be several views of a rank's samples.

        Inside of a step the note comes at its end: what passes before it print is not shown.
        """
        samples, parts = self._samples, 1
        if self._inside_step:
            pipeline = local_model.pipeline if self._mesh.pipeline.size > 1 else None
            parts = self._accumulate * (pipeline.num_microbatches if pipeline else 1)
        elif self._watch.yielded is not None:
            samples = self._watch.yielded.rows
        if parts * self._mesh.data.size == 1:
            return
        sizes = {samples // parts, -(-samples // parts)} - {0}
        views = [rows // size for size in sizes if rows % size == 0]
        if views and rows not in sizes and rows:
            self._views = {"rows": rows, "samples": rows // views[0], "views": views[0]}
        if self._views and not self._inside_step:
            self._tell_views()

    def _tell_views(self) -> None:
        facts, self._views = self._views, {}
        self._prepared.note_once(VIEWS, **facts)

    def _gather(self, x: Tensor, local_model: base.LocalModel) -> Tensor:
        end_trial()  # which one rank alone may make
        if self._evaluates:
            raise UsageError(EVALUATION)
        if self._microbatches.answer is not None:
            rows, self._rows = self._microbatches.gather(x)
            return rows
        if self._plans:
            self._has_planned_gather = True
            self._rows = slice(0, len(x))
            return x
        if not local_model.strategy_state.is_synchronous:
            raise StrategyRefused(OTHER_WEIGHTS)
        if self._inside_step and self._mesh.pipeline.size > 1:
            raise StrategyRefused(STAGES)
        if self._inside_step and self._accumulate > 1:
            raise StrategyRefused(MICROBATCHES.format(parts=self._accumulate))
        axis = self._mesh.data
        stands_in = self._stands_in
        if not self._inside_step and self._watch.yielded is not None:
            stands_in = self._watch.yielded.rows == 0
        with self._watch.paused():
            own = x[:0] if stands_in and x.dim() else x
            counts = count_rows(own, axis)
            start = sum(counts[: axis.rank])
            # A stand-in is the first sample of the global batch, so another rank has its row.
            self._rows = slice(0, 1) if stands_in else slice(start, start + len(own))
            return gather_rows(own, axis, counts)

    def before_passes(self, batch: base.LocalBatch) -> base.LocalBatch:
        """Return the batch of a step, after a function in parts has gathered its rows. Collective.

        The passes before the step repeat random numbers, which global draws cannot.
        """
        compute_loss, is_pipeline = batch.step.compute_loss, self._mesh.pipeline.size > 1
        if is_pipeline:
            gathers_in_parts = self._microbatches.is_known(compute_loss)
        else:
            gathers_in_parts = self._accumulate > 1
        is_computed = isinstance(compute_loss, base.ComputedLoss)
        if not gathers_in_parts or is_computed or self._prepared.settings.draws != "rank":
            return batch
        local_model = self._prepared.local_model()
        if not local_model.strategy_state.is_synchronous:
            return batch
        parts = [*accumulated(batch, self._accumulate, local_model, self._mesh)]
        if is_pipeline:
            count = local_model.pipeline.num_microbatches
            parts = [micro for part in parts for micro in split_microbatches(part, count, count)]
        with self._prepared.guards.phase:
            return self._microbatches.prepare(batch, parts, local_model)

    def gathers_before(self, compute_loss: base.ComputeLoss) -> bool:
        """Return whether a function gathers before the passes of a step of a pipeline."""
        return self._mesh.pipeline.size > 1 and self._microbatches.is_known(compute_loss)

    @property
    def rows(self) -> slice:
        """The rows of this rank in the tensor that was gathered last."""
        if self._rows is None:
            raise UsageError("run.rows: nothing was gathered yet. Call run.gather(tensor) first.")
        return self._rows

    def begin_step(self, batch: base.LocalBatch) -> None:
        """Gather rows of `batch` from now on, and after `end_step` until the next step."""
        self._stands_in = batch.num_samples == 0
        self._rows = None
        self._samples = batch.num_samples
        self._inside_step = True

    def end_step(self) -> None:
        """Gather no longer inside of a step, also after an error in it."""
        self._inside_step = False
        if self._views:
            self._tell_views()

    @contextmanager
    def planning(self, compute_loss: base.ComputeLoss) -> Iterator[None]:
        """Return the rows of this rank alone inside, where a pipeline is divided: some ranks run
        the function more often than others. Notes if it gathers. Collective.
        """
        self._plans = self._mesh.pipeline.size > 1
        try:
            yield
        finally:
            is_pipeline, self._plans = self._plans, False
        if is_pipeline:
            self._microbatches.note(compute_loss, self._has_planned_gather)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Refuse to gather inside."""
        self._watch.end()
        self._evaluates = True
        try:
            yield
        finally:
            self._evaluates = False
