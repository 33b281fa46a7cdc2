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
from shoal.errors import ShoalError
from shoal.platform.torch_private.module_state import BatchNormBase
from shoal.run.guards import Guards
from shoal.run.prepared import Prepared
from shoal.run.step_output import StepOutput
from shoal.strategies import base
from shoal.trial import LossTrial
from shoal.trial.judge_loss import MAX_ROWS
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

    def before_step(self, batch: base.LocalBatch) -> base.LocalBatch:
        """Try the loss if a trial is due. Return the batch to compute."""
        if not self._guards.enabled:
            return batch
        if self._trial is None:
            self._trial = trial = self._make()
            trial.begin_step(batch)
            self._try_first(trial, batch)
        else:
            trial = self._trial
            trial.begin_step(batch)
            if self._is_due(trial):
                self._try_again(trial, batch)
        if trial.verdict is not None:
            batch = batch._replace(objection=lambda: trial.objection)
        return batch

    def _try_first(self, trial: LossTrial, batch: base.LocalBatch) -> None:
        """Try the loss in the first step. Collective."""
        sizes, data = self._prepared.sizes, self._prepared.mesh.data
        sizes.check_shared(data)
        if not batch.sizes_known and data.size > 1:
            sizes.note_same_rows([batch.args, batch.kwargs], data, self._announce)
        with self._guards.in_step(), self._whole_models() as are_whole:
            batch = self._with_rows_of_all_ranks(batch)
            if batch.num_samples < 2:
                return
            if not are_whole:
                trial.note_divided()
                return
            with own_progress().during(Phase.FORWARD):
                trial.try_models(batch)

    def _is_due(self, trial: LossTrial) -> bool:
        """Return True if a later step makes a trial. Collective in few steps, where models are
        divided among ranks, for all of them must put their parts together.
        """
        if not (trial.has_news or trial.is_scheduled):  # as in most steps
            return False
        model, mesh = self._prepared.local_model(), self._prepared.mesh
        if mesh.pipeline.size > 1:
            return False  # each rank has some layers
        if not self._is_divided(model):
            return trial.has_news or trial.counts_rows
        if not trial.is_scheduled or not model.strategy_state.is_synchronous:
            return False
        wants = torch.tensor(float(trial.has_news or trial.counts_rows), device=mesh.host_device)
        return bool(mesh.all_reduce_max(wants))

    def _try_again(self, trial: LossTrial, batch: base.LocalBatch) -> None:
        """Try the loss on a later batch. Collective where models are divided among ranks."""
        # A capacity shows in as many rows as the models are given at once.
        rows = -(-batch.num_samples // self._prepared.settings.accumulate)
        max_rows = max(MAX_ROWS, rows) if trial.counts_rows else MAX_ROWS
        with self._guards.in_step(), self._whole_models() as are_whole:
            if are_whole and batch.num_samples >= 2:
                with own_progress().during(Phase.FORWARD):
                    trial.try_models(batch, max_rows)

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

    def _whole_models(self) -> AbstractContextManager[bool]:
        """Return a context that yields True if this rank can run the models alone in it.

        Collective.
        """
        model = self._prepared.local_model()
        if model.outside_step.whole_models is not None:
            return model.outside_step.whole_models()
        return nullcontext(not self._is_divided(model))

    @staticmethod
    def _is_divided(model: base.LocalModel) -> bool:
        """Return True if this rank alone cannot run the models."""
        if model.outside_step.whole_models is not None or model.has_sharded_params:
            return True
        # A trial evaluates layers of batch statistics, which then need no other rank; those that
        # have no running statistics do.
        return model.pass_traits.collective_forward and any(
            isinstance(module, BatchNormBase) and module.running_mean is None
            for module in model.module.modules()
        )

    def _make(self) -> LossTrial:
        prepared = self._prepared
        mesh = prepared.mesh
        stages = 2 if mesh.pipeline.size > 1 else 1  # there are several micro-batches then
        return LossTrial(
            prepared.models,
            mesh.data.size * prepared.settings.accumulate * stages,
            self._announce,
            # Under servers a pass waits for values that a thread receives.
            in_child=prepared.local_model().remote_optimizer is None,
        )
