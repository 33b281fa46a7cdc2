"""Trials of the loss in the steps of a run.

before a step    the loss is tried on parts of the batch; in the first step, before a strategy
                 has divided the models
in the step      objections travel with the totals
after the step   all ranks raise together, before the optimizer steps
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from shoal.comm.row_collectives import gather_rows
from shoal.data.tree_map import are_tensors
from shoal.errors import ShoalError, StrategyRefused
from shoal.run.guards import Guards
from shoal.run.prepared import Prepared
from shoal.run.step_output import StepOutput
from shoal.strategies import base
from shoal.trial import LossTrial
from shoal.trial.judge_loss import MAX_ROWS
from shoal.trial.untouched import leaving_no_trace
from shoal.watchdog.progress_word import Phase
from shoal.watchdog.progress_writer import own_progress


class StepTrials:
    """Connects the trial of the loss with the steps of a run.

    Args:
        announce: prints a note, on one rank of all.
    """

    def __init__(self, prepared: Prepared, guards: Guards, announce: Callable[[str], None]) -> None:
        self._prepared = prepared
        self._guards = guards
        self._announce = announce
        self._trial: LossTrial | None = None
        self._keeps_scale = False
        self._tries_again = False

    def before_step(self, batch: base.LocalBatch) -> base.LocalBatch:
        """Return the batch to compute; a trial may look on."""
        if not self._guards.enabled:
            return batch
        if self._trial is not None:
            batch = self._tried(self._trial, batch)
            return batch._replace(keeps_scale=True) if self._keeps_scale else batch
        sizes, data = self._prepared.sizes, self._prepared.mesh.data
        sizes.check_shared(data)
        if not batch.sizes_known and data.size > 1:
            sizes.note_same_rows([batch.args, batch.kwargs], data, self._announce)
        with self._guards.in_step(), self._whole_models() as whole_models:
            self._trial = self._make(whole_models)
            tried = self._with_rows_of_all_ranks(batch)
            if tried is batch:
                batch = self._tried(self._trial, batch)
            elif whole_models:
                batch = self._tried_with_others(self._trial, tried, batch)
        found = self._found_on_any_rank(self._trial)
        self._keeps_scale, self._tries_again = found
        if self._keeps_scale:
            self._check_keeps_gradients()
        return batch._replace(keeps_scale=self._keeps_scale)

    def _with_rows_of_all_ranks(self, batch: base.LocalBatch) -> base.LocalBatch:
        """Return the samples of all data ranks as one batch, if a rank has fewer than two of its
        own and so nothing to compare; else the batch itself. Collective.
        """
        data, rows = self._prepared.mesh.data, batch.num_samples
        is_synchronous = self._prepared.local_model().strategy_state.is_synchronous
        if data.size == 1 or not is_synchronous:
            return batch
        tensors = [*batch.args, *batch.kwargs.values()]
        can_join = are_tensors(tensors) and all(
            t.layout is torch.strided and not t.is_nested and t.shape[:1] in ((rows,), (1,))
            for t in tensors
        )
        few, cannot, total = data.sum_of_host_numbers([rows < 2, not can_join, rows])
        if not few or cannot or total < 2:
            return batch
        # A rank without samples stands in with a copy of another one's.
        args = tuple(gather_rows(tensor.detach()[:rows], data) for tensor in batch.args)
        kwargs = {name: gather_rows(t.detach()[:rows], data) for name, t in batch.kwargs.items()}
        return batch._replace(args=args, kwargs=kwargs, num_samples=int(total))

    def _tried_with_others(
        self, trial: LossTrial, everyone: base.LocalBatch, batch: base.LocalBatch
    ) -> base.LocalBatch:
        """Try the models on the samples of all ranks; return this rank's batch."""
        if trial.is_due(everyone):
            with own_progress().during(Phase.FORWARD):
                trial.try_models(everyone)
        return batch._replace(objection=lambda: trial.objection)

    def _found_on_any_rank(self, trial: LossTrial) -> tuple[bool, bool]:
        """Return whether gradients are bounded on their way back, and whether rows are counted, on
        any rank. Collective, where ranks step together.
        """
        mesh = self._prepared.mesh
        if not self._prepared.local_model().strategy_state.is_synchronous:
            return trial.bounds_gradients, trial.counts_rows  # nothing is sent between rounds
        flags = [float(trial.bounds_gradients), float(trial.counts_rows)]
        bounds, counts = mesh.all_reduce_max(torch.tensor(flags, device=mesh.host_device)).tolist()
        return bool(bounds), bool(counts)

    def _check_keeps_gradients(self) -> None:
        """Raise StrategyRefused if bounded gradients are used before a factor can follow."""
        if self._prepared.steps_in_backward and self._prepared.mesh.data.size > 1:
            raise StrategyRefused(
                "step_in_backward: a hook or an autograd.Function bounds gradients on their way "
                "back, and here they would be as many times as large as there are ranks. Leave out "
                "step_in_backward, or bound the gradients of parameters."
            )

    def after_step(self, output: StepOutput) -> None:
        """Raise UsageError on all ranks if one of them objects to the loss."""
        trial = self._trial
        if trial is None:
            return
        if output.numbers is not None:
            objections = output.numbers[base.OBJECTIONS]
        elif trial.is_scheduled:  # a look at the totals waits for the step, so it is taken in few
            objections = output.totals[base.OBJECTIONS].item()
        else:
            return
        if objections or trial.verdict is not None:
            trial.after_step(round(objections))

    def explain(self, error: Exception) -> Exception:
        """Return this rank's objection to the loss in place of an error that the step has met, or
        the error if there is none.

        A loss that fails on parts of a batch fails in the step, before `after_step` can tell it.
        """
        if self._trial is None or isinstance(error, ShoalError):
            return error
        return self._trial.refusal() or error

    def _tried(self, trial: LossTrial, batch: base.LocalBatch) -> base.LocalBatch:
        is_due = trial.is_due(batch)
        if is_due or (self._tries_again and trial.is_scheduled):
            with own_progress().during(Phase.FORWARD):
                return self._tried_now(trial, batch, is_due)
        if trial.verdict is None:  # as in most steps
            return batch
        return batch._replace(objection=lambda: trial.objection)

    def _tried_now(self, trial: LossTrial, batch: base.LocalBatch, is_due: bool) -> base.LocalBatch:
        if self._tries_again and trial.is_scheduled:
            self._try_models_again(trial, batch)
        if not is_due and trial.verdict is None:
            return batch
        if is_due:
            with self._guards.in_step():
                batch = trial.begin(batch)
                if self._prepared.is_applied and self._prepared.mesh.pipeline.size > 1:
                    self._try_stages(trial, batch)
        return batch._replace(objection=lambda: trial.objection)

    def _try_models_again(self, trial: LossTrial, batch: base.LocalBatch) -> None:
        """Try whole models, where a later batch may couple its rows. Collective."""
        if self._prepared.mesh.pipeline.size > 1:
            return  # each rank has some layers
        rows = -(-batch.num_samples // self._prepared.settings.accumulate)
        with self._guards.in_step(), self._whole_models() as whole_models:
            if whole_models and batch.num_samples >= 2:
                trial.try_models_again(batch, max(MAX_ROWS, rows))

    def _try_stages(self, trial: LossTrial, batch: base.LocalBatch) -> None:
        """Try the loss on what the stages of a pipeline compute. Collective over the pipeline."""
        model = self._prepared.local_model()
        if model.pass_traits.collective_forward and not trial.is_scheduled:
            return  # other data ranks have no news, and make no pass
        given = batch.args, batch.kwargs
        with leaving_no_trace(self._prepared.models, batch.compute_loss, given) as can_repeat:
            # Ranks decide alike: an iterator may have been read on some of them.
            if self._prepared.mesh.pipeline.sum_of_host_numbers([not can_repeat])[0] == 0:
                trial.try_stages(batch, model.outside_step.call)

    def _whole_models(self) -> AbstractContextManager[bool]:
        """Return a context that yields True if this rank can run the models alone in it.

        Collective.
        """
        model = self._prepared.local_model()
        if model.outside_step.whole_models is not None:
            return model.outside_step.whole_models()
        is_divided = model.pass_traits.collective_forward or model.has_sharded_params
        return nullcontext(not is_divided)

    def _make(self, whole_models: bool) -> LossTrial:
        prepared = self._prepared
        mesh = prepared.mesh
        stages = 2 if mesh.pipeline.size > 1 else 1  # there are several micro-batches then
        return LossTrial(
            prepared.models,
            mesh.data.size * prepared.settings.accumulate * stages,
            self._announce,
            runs_once=stages == 1,
            # Under servers a pass waits for values that a thread receives.
            in_child=prepared.local_model().remote_optimizer is None,
            in_parts=prepared.settings.accumulate > 1,
            whole_models=whole_models,
        )
