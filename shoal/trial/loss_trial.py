"""The trials of a run: in its first step, and when batches show news.

A batch decides what a trial can see: a loss that leaves out padding is a mean until the first
padded sample comes. So trials are repeated for new shapes and labels, on recorded outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import wraps
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from shoal.data.seeds import GeneratorStates
from shoal.data.tree_map import tensors_in
from shoal.errors import UsageError
from shoal.platform.torch_private.subclasses import disable_dispatch_modes
from shoal.trial.batch_rows import count_rows
from shoal.trial.child_process import can_fork, judged_in_child
from shoal.trial.judge_loss import try_loss
from shoal.trial.loss_verdict import CURES, LossKind, LossVerdict
from shoal.trial.recorded_outputs import OutputRecorder, try_recorded
from shoal.trial.staged_outputs import record_in_stages
from shoal.trial.untouched import devices_of

MOST_NEWS = 32
"""Trials after the first one, for batches of new shapes or labels."""
LOOKS_ALWAYS, LOOKS_EVERY = 64, 8
"""Steps whose batches are looked at for news: the first ones, later every eighth."""
SPLITS_ALWAYS = 4
"""Steps in which whole models are tried in all splits; later in one, at two passes."""
MOST_LABELS = 1 << 16
"""Numbers of the largest tensor whose lowest and highest number are looked at in every step."""

_WITHOUT_ANSWER = (LossKind.NOT_TRIED, LossKind.CANNOT_JUDGE)
_INSIDE = (
    "Computed from the outputs of the models alone it is one, so it happens inside of a model: a "
    "mean over the batch, or a balance of experts."
)


class LossTrial:
    """Try the loss of a run in some steps, and tell what was found once.

    Makes no collective itself. The caller sums `objection` over all ranks of the mesh, so that
    `after_step` raises on all of them.

    Args:
        models: the modules that compute_loss calls.
        num_parts: parts that a global batch is computed in: ranks of the data axis, times
            micro-batches. If it is 1, an objection is a note.
        announce: prints a note; on one rank of many.
        whole_models: this rank can run the models without the others, and has all parameters whole.
        in_child: judge in a forked child, which has no threads that its passes would wait for.
        in_parts: a step computes the batch in several micro-batches.
        runs_once: a step runs compute_loss once for each micro-batch, with all of its values. If
            not, as in a pipeline, later trials are those of `try_stages`.

    Attributes:
        bounds_gradients: a trial has found that gradients do not grow with the loss.
        counts_rows: a trial of the models has met an operator that counts or orders rows.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        num_parts: int,
        announce: Callable[[str], None],
        whole_models: bool,
        runs_once: bool = True,
        in_child: bool = True,
        in_parts: bool = False,
    ) -> None:
        self._models = list(models)
        self._num_parts = num_parts
        self._announce = announce
        self._whole_models = whole_models
        self._runs_once = runs_once
        in_child = in_child and can_fork()
        self._judged = judged_in_child if in_child else _judged_here
        # In a child one more pass leaves no trace, and one child costs less than two.
        self._at_once = in_child and runs_once and not in_parts
        self._steps = 0
        self._due_step = 1
        self._is_scheduled = False
        self._news = _News()
        self._noted: set[LossKind] = set()
        self._verdict: LossVerdict | None = None
        self._runs_on_parts = False  # as whole models have shown in the first step
        self.bounds_gradients = False
        self.counts_rows = False

    @property
    def verdict(self) -> LossVerdict | None:
        """The verdict of this step's trials on this rank, or an objection before; None if none."""
        return self._verdict

    @property
    def is_scheduled(self) -> bool:
        """True in steps 1, 2, 4, 8, ..., in which all ranks hear of objections.

        Trials because of new shapes or labels are made by some ranks alone. An objection stays
        until `after_step` has been told of it.
        """
        return self._is_scheduled

    @property
    def objection(self) -> int:
        """1 if this rank has found that the loss is no mean over samples, else 0."""
        return int(self._verdict is not None and self._verdict.objects)

    def before_step(self, batch: Any) -> Any:
        """Try the loss if a trial is due. Returns the batch that the step is to compute.

        Its `compute_loss` may be one that tries the recorded outputs in the first forward pass.

        Args: batch: a LocalBatch of all samples of this rank.
        """
        return self.begin(batch) if self.is_due(batch) else batch

    def is_due(self, batch: Any) -> bool:
        """Return True if the loss is to be tried in this step. To be called once in each step."""
        self._steps += 1
        self._is_scheduled = self._steps >= self._due_step
        if self._is_scheduled:
            self._due_step = 2 * self._steps
        if self._verdict is not None and not self._verdict.objects:
            self._verdict = None
        looks = self._steps <= LOOKS_ALWAYS or self._steps % LOOKS_EVERY == 0
        is_new = looks and self._news.has(batch.args, batch.kwargs)
        return (self._steps == 1 or is_new) and batch.num_samples >= 2

    def begin(self, batch: Any) -> Any:
        """Do what `before_step` does in a step whose trial is due."""
        # Later the models may be divided among ranks.
        is_first = self._steps == 1
        if is_first and self._whole_models and self.try_models(batch):
            return batch
        if not self._runs_once:
            return batch
        return batch._replace(compute_loss=self._watching(batch, 3 if is_first else 1))

    def try_models(self, batch: Any) -> bool:
        """Try the loss by running the models, which must be whole on this rank. Not collective.

        Returns: True if it was tried on the outputs of the whole batch too.
        """
        parameters = [parameter for model in self._models for parameter in model.parameters()]

        def judge() -> list[LossVerdict]:
            verdict = try_loss(
                *(batch.compute_loss, batch.args, batch.kwargs, batch.num_samples),
                *(self._models, parameters),
            )
            if self._at_once and verdict.kind not in _WITHOUT_ANSWER:
                return [verdict, self._of_outputs(batch)]
            return [verdict]

        verdicts = self._judged(judge)
        for verdict in verdicts:
            self._take(verdict)
        return len(verdicts) > 1

    def _of_outputs(self, batch: Any) -> LossVerdict:
        """Return the verdict on the outputs of the models for all samples of this rank."""
        recorder, states = OutputRecorder(self._models), GeneratorStates(devices_of(self._models))
        with recorder.recording():
            batch.compute_loss(*batch.args, **batch.kwargs)
        states.restore()
        return try_recorded(
            *(batch.compute_loss, batch.args, batch.kwargs, batch.num_samples, self._models),
            *(recorder.calls, 3, self._steps),
        )

    def try_models_again(self, batch: Any, max_rows: int) -> None:
        """Try the loss as `try_models` does, on more rows, for what couples them since an earlier
        step; after a few trials in one split. Not collective.
        """
        num_splits = 3 if self._steps <= SPLITS_ALWAYS else 1
        parameters = [parameter for model in self._models for parameter in model.parameters()]
        (verdict,) = self._judged(
            lambda: [
                try_loss(
                    *(batch.compute_loss, batch.args, batch.kwargs, batch.num_samples),
                    *(self._models, parameters),
                    max_rows=max_rows,
                    num_splits=num_splits,
                    seed=self._steps,
                )
            ]
        )
        # A run does not end in its middle for parts that fail, as those without a positive may.
        if verdict.kind is LossKind.COUPLED:
            self._take(verdict)

    def try_stages(self, batch: Any, call: Callable[..., Any]) -> None:
        """Try the loss on the last stage of a pipeline. Collective over the pipeline.

        Args: call: `OutsideStep.call` of the local model.
        """
        record = record_in_stages(batch, self._models, call)
        if record is not None:
            record.generators.restore()
            verdict = try_recorded(
                *(batch.compute_loss, batch.args, batch.kwargs, batch.num_samples),
                *(self._models, record.calls, 1, self._steps),
            )
            self._take(verdict)

    def refusal(self) -> UsageError | None:
        """Return the error of this rank's objection; None without one, or if a batch is whole."""
        if self._verdict is None or not self.objection or self._num_parts == 1:
            return None
        return UsageError(self._verdict.text())

    def after_step(self, objections: int) -> None:
        """Raise or note what the step has found. To be called before the optimizer's step.

        Args: objections: the sum of `objection` over all ranks.

        Raises: UsageError: on each rank, if one objects and batches are computed in parts.
        """
        verdict = self._verdict
        if objections and self._num_parts > 1:
            raise self.refusal() or UsageError(
                "compute_loss is no mean over samples, as another rank has found with its samples; "
                f"the error of that rank says more. {CURES}"
            )
        if verdict is not None:
            self._note(verdict)
            self._verdict = None

    def _take(self, verdict: LossVerdict) -> None:
        """Keep the verdict that says more: an objection, then any that could be reached."""
        if verdict.outputs_only and verdict.kind is LossKind.FAILS_ON_PARTS and self._runs_on_parts:
            return  # an output without samples has as many entries as there are samples
        self._runs_on_parts |= verdict.kind in (LossKind.MEAN, LossKind.COUNTED)
        self.bounds_gradients |= verdict.bounds_gradients
        self.counts_rows |= verdict.counts_rows
        old = self._verdict
        if old is None or (not old.objects and (verdict.objects or old.kind in _WITHOUT_ANSWER)):
            self._verdict = verdict
        elif old.objects and not old.cause and verdict.kind not in _WITHOUT_ANSWER:
            self._verdict = replace(old, cause="" if verdict.objects else _INSIDE)

    def _note(self, verdict: LossVerdict) -> None:
        """Announce a verdict that is worth it, once for each kind."""
        # After the first step a trial sees outputs only, and may well fail to tell more.
        is_idle = verdict.kind in _WITHOUT_ANSWER and (self._steps > 1 or not verdict.reason)
        is_good = verdict.kind in (LossKind.MEAN, LossKind.COUNTED)
        if is_idle or is_good or verdict.kind in self._noted:
            return
        self._noted.add(verdict.kind)
        prefix = (
            "on more than one rank, or in micro-batches, this loss will be refused: "
            if verdict.objects
            else ""
        )
        self._announce(f"note: {prefix}{verdict.text()}")

    def _watching(self, batch: Any, num_splits: int) -> Callable[..., Any]:
        """Return a compute_loss whose first call is tried on its recorded outputs."""
        compute_loss, recorder, seed = batch.compute_loss, OutputRecorder(self._models), self._steps
        devices = devices_of(self._models)
        due = True

        @wraps(compute_loss)  # strategies know functions by their names
        def watched(*args: Any, **kwargs: Any) -> Any:
            nonlocal due
            if not due:
                return compute_loss(*args, **kwargs)
            before = GeneratorStates(devices)
            with recorder.recording():
                result = compute_loss(*args, **kwargs)
            after = GeneratorStates(devices)
            # What was drawn before the models were called must be drawn again in the trial.
            before.restore()
            try:
                num_rows = _num_rows(args, kwargs, batch)
                with disable_dispatch_modes():
                    (verdict,) = self._judged(
                        lambda: [
                            _without_autocast(
                                lambda: try_recorded(
                                    *(compute_loss, args, kwargs, num_rows, self._models),
                                    *(recorder.calls, num_splits, seed),
                                )
                            )
                        ]
                    )
            finally:
                after.restore()
            due, recorder.calls = False, []
            self._take(verdict)
            return result

        return watched


def _judged_here(judge: Callable[[], list[LossVerdict]]) -> list[LossVerdict]:
    return judge()


class _News:
    """Shapes and extreme labels that no batch had before."""

    def __init__(self) -> None:
        self._shapes: set[tuple[torch.Size, ...]] = set()
        self._extremes: dict[int, tuple[int, int]] = {}
        self._count = 0

    def has(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return True for a batch with news, `MOST_NEWS` times at most."""
        if self._count >= MOST_NEWS:
            return False
        tensors = list(islice(tensors_in([args, kwargs]), 8))
        shapes = tuple(tensor.shape for tensor in tensors)
        is_new = shapes not in self._shapes
        self._shapes.add(shapes)
        for index, tensor in enumerate(tensors):
            if _is_label(tensor) and self._widens(index, tensor):
                is_new = True
        self._count += is_new
        return is_new

    def _widens(self, index: int, labels: Tensor) -> bool:
        """Return True if a label is lower or higher than all of this tensor before."""
        lowest, highest = (int(extreme) for extreme in labels.aminmax())
        low, high = self._extremes.get(index, (lowest, highest))
        self._extremes[index] = min(low, lowest), max(high, highest)
        return lowest < low or highest > high


def _is_label(tensor: Tensor) -> bool:
    # On a device, a look at a number would wait for all that runs there.
    is_integer = tensor.dtype in (torch.int64, torch.int32)
    return is_integer and tensor.device.type == "cpu" and 0 < tensor.numel() <= MOST_LABELS


def _num_rows(args: tuple[Any, ...], kwargs: Mapping[str, Any], batch: Any) -> int:
    """Return the samples of a call: those of the batch, or of a micro-batch of it."""
    given = [*args, *kwargs.values()]
    whole = [*batch.args, *batch.kwargs.values()]
    if len(given) == len(whole) and all(a is b for a, b in zip(given, whole, strict=True)):
        return int(batch.num_samples)
    return count_rows(given)


def _without_autocast(function: Callable[[], LossVerdict]) -> LossVerdict:
    with ExitStack() as stack:
        for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            stack.enter_context(torch.autocast(device, enabled=False))
        return function()
