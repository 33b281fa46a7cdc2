"""The trials of a run: in its first step, and when batches show news.

A batch decides what a trial can see: a loss that leaves out padding is a mean until the first
padded sample comes. So trials are repeated for new shapes and labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from shoal.data.tree_map import tensors_in
from shoal.errors import UsageError
from shoal.trial.child_process import judged_in_child
from shoal.trial.judge_loss import MAX_ROWS, try_loss
from shoal.trial.loss_verdict import CURES, LossKind, LossVerdict

MOST_NEWS = 16
"""Trials after the first one, for batches of new shapes or labels."""
LOOKS_ALWAYS, LOOKS_EVERY = 64, 8
"""Steps whose batches are looked at for news: the first ones, later every eighth."""
SPLITS_ALWAYS = 4
"""Steps in which all splits are tried; a later batch without news is tried in one."""
MOST_LABELS = 1 << 16
"""Numbers of the largest tensor whose lowest and highest number are looked at in every step."""

_WITHOUT_ANSWER = (LossKind.NOT_TRIED, LossKind.CANNOT_JUDGE)


class LossTrial:
    """Try the loss of a run in some steps, and tell what was found once.

    Makes no collective itself. The caller sums `objection` over all ranks of the mesh, so that
    `after_step` raises on all of them.

    Args:
        models: the modules that compute_loss calls.
        num_parts: parts that a global batch is computed in: ranks of the data axis, times
            micro-batches. If it is 1, an objection is a note.
        announce: prints a note; on one rank of many.
        in_child: judge in a forked child, which has no threads that its passes would wait for.

    Attributes:
        counts_rows: a trial has met an operator that counts or orders rows.
        has_news: a batch since the last trial had shapes or labels that none had before.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        num_parts: int,
        announce: Callable[[str], None],
        in_child: bool = True,
    ) -> None:
        self._models = list(models)
        self._num_parts = num_parts
        self._announce = announce
        self._in_child = in_child
        self._steps = 0
        self._due_step = 1
        self._is_scheduled = False
        self._news = _News()
        self._noted: set[LossKind] = set()
        self._verdict: LossVerdict | None = None
        self.counts_rows = False
        self.has_news = False

    @property
    def verdict(self) -> LossVerdict | None:
        """The verdict of this step's trial on this rank, or an objection before; None if none."""
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

    def begin_step(self, batch: Any) -> None:
        """Look at the batch of a step for news. To be called once in each step.

        Args: batch: a LocalBatch of all samples of this rank.
        """
        self._steps += 1
        self._is_scheduled = self._steps >= self._due_step
        if self._is_scheduled:
            self._due_step = 2 * self._steps
        if self._verdict is not None and not self._verdict.objects:
            self._verdict = None
        looks = self._steps <= LOOKS_ALWAYS or self._steps % LOOKS_EVERY == 0
        if looks and self._news.has(batch.args, batch.kwargs):
            self.has_news = True

    def try_models(self, batch: Any, max_rows: int = MAX_ROWS) -> None:
        """Try the loss by running the models, which must be whole on this rank. Not collective."""
        is_first = self._steps == 1
        num_splits = 3 if self.has_news or self._steps <= SPLITS_ALWAYS else 1
        parameters = [parameter for model in self._models for parameter in model.parameters()]

        def judge() -> LossVerdict:
            return try_loss(
                *(batch.compute_loss, batch.args, batch.kwargs, batch.num_samples),
                *(self._models, parameters),
                max_rows=max_rows,
                num_splits=num_splits,
                seed=self._steps - 1,
            )

        self.has_news = False
        verdict = judged_in_child(judge) if self._in_child else judge()
        # A run does not end in its middle for parts that fail, as those without a positive may.
        if is_first or verdict.kind in (LossKind.COUPLED, LossKind.SUM):
            self._take(verdict)

    def note_divided(self) -> None:
        """Tell that no rank can run the models: their parts are too large to be put together."""
        reason = "no rank has the whole models, and they are too large to be put together for it"
        self._take(LossVerdict(LossKind.NOT_TRIED, reason=reason))

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
        """Keep a verdict, unless an objection waits to be told."""
        self.counts_rows |= verdict.counts_rows
        if not self.objection:
            self._verdict = verdict

    def _note(self, verdict: LossVerdict) -> None:
        """Announce a verdict that is worth it, once for each kind."""
        is_idle = verdict.kind in _WITHOUT_ANSWER and not verdict.reason
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
