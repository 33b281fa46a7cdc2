"""A watch over what a loop does with a batch before a step is given it, or a loss of it.

for x, y in loader:                              each rank has its rows of the global batch
    x = 0.7 * x + 0.3 * x[torch.randperm(len(x))]      and mixes these alone
    run.forward_backward(compute_loss, x, y)           so one device would give other numbers

No trial of the loss can see it, for the loss itself is a mean. So before some steps, the first ones
among them, the loop's operators run on a copy of the batch too, in which some samples are others.
A loss of the loop is watched from the outputs of its models on: targets and weights in it may be
computed from the outputs, or the labels, of other samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from shoal.comm.mesh import Mesh
from shoal.data.batch_shards import BatchShard
from shoal.data.own_generators import LoopGenerators
from shoal.data.seeds import HostGenerators
from shoal.data.sharded_loader import YieldWatch
from shoal.data.tree_map import row_tensors, tensors_in
from shoal.errors import UsageError
from shoal.platform.script_line import caller, script_frame
from shoal.strategies.base import LocalBatch
from shoal.strategies.loss_terms import Counted
from shoal.trial.batch_rows import OtherRows
from shoal.trial.loss_graph import takes_pairs
from shoal.trial.mixed_rows import lie_in_order, mixes_rows
from shoal.trial.reached import tensors_of
from shoal.trial.replaced_rows import ReplacedRows

EARLY_STEPS = 4
"""Steps before which the loop is watched; later ones are 8, 16, 32, ..."""
MOST_BATCHES = 4
"""Batches that are watched for one step: a loop may fetch ahead, or evaluate."""

MIXED = (
    "{call} was given samples that the loop has computed from other samples of this rank{place}, "
    "as mixup, a normalisation over the batch or a choice of the hardest samples does. One device "
    "would take the samples of all ranks. run.gather(tensor) returns them: everyone = "
    "run.gather(x) gives mean and deviation of the whole batch, and run.gather(x)[order][run.rows] "
    "partners for this rank's rows, with an order that is the same on all ranks, such as "
    "torch.randperm(n, generator=torch.Generator().manual_seed(step)). Or do it in the loader's "
    "collate_fn, which is given whole batches then. Or, to let each rank take its own samples and "
    'train the mean over ranks, say so: run.{call}(..., reduction="ranks").'
)
ONE_NUMBER = (
    "note: forward_backward was given a number that the loop has computed from the samples of this "
    "rank alone. One device computes it from the samples of all ranks, and so does "
    "run.gather(tensor).mean(). A count that goes into shoal.counted is right as it is."
)
TABLE = (
    "note: run.backward was given a loss that computes with a tensor of shape {place}, in which "
    "ranks differ. One device has one, of all samples: compute it from run.gather(tensor), the "
    "same on all ranks."
)
FIGURE = (
    "note: a number that the loop reads ({place}), as loss.item(), is of this rank's samples; "
    "one device has all of the batch. forward_backward returns the mean loss over all, "
    "run.evaluate computes figures of all samples, shoal.all_reduce(tensor) sums those of ranks."
)
"""Note about a figure of a function's script; `run.backward` has one for every loop."""
BRANCH = (
    "note: the loop asks a tensor of this rank's samples alone whether something holds ({place}). "
    "One device asks all samples, and here each rank may take another branch. "
    'shoal.all_reduce(answer.float(), op="max") > 0 tells if it holds on any rank, and '
    "run.gather(tensor) gives the samples of all."
)
DRAWN = (
    "note: the loop draws random numbers by torch ({place}): other ones on each data rank, so same "
    'law, other numbers. Drawn inside of compute_loss, draws="global" makes them those of one '
    "device."
)
HOST_DRAWN = (
    "note: the loop draws random numbers by {generator}, at least as many as this rank has samples "
    "({rows}). All ranks draw the same ones. For numbers that count for the whole batch that is "
    "right; where each sample takes its own, one device gives it others. Draw those in the data "
    "set's __getitem__, where each sample has the numbers of one device."
)


class LoopWatch(YieldWatch):
    """Finds samples of a batch that a loop computes from other samples of the rank.

    Attributes:
        yielded: the shard that was yielded last; None before the first.
        enabled: False with one data rank, without guards, and where each rank steps by itself.
        has_loader: a loader was prepared. Without one, only `run.share` gives batches.
        drawn: what drew the random numbers that the loop was seen to draw for its samples, "torch
            (train.py:12)", "NumPy" or "Python"; "" if nothing was seen.

    Args: note: prints a note once, with facts by name.
    """

    def __init__(self, mesh: Mesh, enabled: bool, note: Callable[..., None]) -> None:
        self.yielded: BatchShard | None = None
        self._data = mesh.data
        self.enabled = enabled and mesh.data.size > 1
        self.has_loader = False
        self.drawn = ""
        self._note = note
        self._rows = ReplacedRows()
        self._other_rows = OtherRows()
        self._calls = 0
        self._batches = 0
        # When the last batch was yielded that is watched.
        self._generators: HostGenerators | None = None
        self._of_loop = LoopGenerators(None)
        # (replaced rows, the rows that stand in their places) for each number of samples; other
        # ones where rows may lie in another order than in the batch.
        self._chosen: dict[tuple[int, bool], tuple[Tensor, Tensor]] = {}

    def begin(self, batch: Any, shard: BatchShard) -> None:
        """Watch what this thread does with a batch that it is given now."""
        self.yielded = shard
        if not self._is_due:
            return
        others = {id(t) for t in self._other_rows.found_in(batch, shard.rows)}
        self._rows.stop()
        self._rows.of_loss = False
        if self._batches < MOST_BATCHES and shard.rows >= 2:
            self._batches += 1
            rows = [t for t in _with_rows(batch, shard.rows) if id(t) not in others]
            self._rows.copy_rows(rows, *self._choose(shard.rows))
        self._rows.start()
        self._generators = HostGenerators.now()
        self._of_loop = LoopGenerators(script_frame(caller(), with_packages=False))  # not tqdm's

    def end(self) -> None:
        """Watch no longer; what was seen stays known until the batch is judged."""
        if self.enabled:
            self._rows.stop()

    def paused(self) -> AbstractContextManager[None]:
        """Return a context whose results count as computed from the samples of all ranks."""
        return self._rows.paused()

    def follow(self, inputs: Any, output: Any) -> None:
        """Watch what this thread does with what a model has returned, a row for each sample."""
        if not self._is_due or self.yielded is None or self.yielded.rows < 2:
            return
        samples = self.yielded.rows
        chosen = self._choose(samples, is_apart=not self._in_order(inputs))
        # A hidden state of as many layers as samples has its samples in dimension 1.
        rows = [t for t in _with_rows(output, samples) if t.dim() < 3 or t.shape[1] != samples]
        self._rows.copy_rows(rows, *chosen)
        self._rows.of_loss = True
        self._rows.start()

    def judge(self, batch: LocalBatch) -> None:
        """Raise UsageError on all ranks if a rank has mixed its samples. Collective.

        To be called in each step whose loss is that of the global batch.
        """
        if not self._comes_due():
            return
        is_mixed = self._mixes(self._tensors_of(batch))
        self._note_numbers(batch)
        for place in [*self._rows.figures][:1]:
            self._note(FIGURE, place=place)
        for place in [*self._rows.draws][:1]:
            self._note(DRAWN, place=place)
            self.drawn = self.drawn or f"torch ({place})"
        self.note_host_draws(batch.num_samples)
        self._agree(MIXED.format(call="forward_backward", place="") if is_mixed else "")

    def judge_loss(self, calls: Sequence[tuple[Any, ...]], loss: Tensor | Counted) -> None:
        """Raise UsageError on all ranks if a rank has mixed samples for its loss. Collective.

        Args: calls: inputs of the models.
        """
        if not self._comes_due():
            return
        taken = (line for line, pairs in self._rows.pairs if takes_pairs(loss, pairs))
        place = self._rows.mixed_place or next(taken, "")
        is_mixed = bool(place) or any(self._mixes(tensors_in(inputs)) for inputs in calls)
        where = f" ({place})" if place else ""
        self._agree(MIXED.format(call="backward", place=where) if is_mixed else "")

    def _comes_due(self) -> bool:
        """Count a step; return True on all ranks if its samples are to be judged."""
        is_due, self._calls = self._is_due, self._calls + 1
        # Alike on all ranks, also where one has looked at a batch of a loader by itself.
        has_source = self.has_loader or self.yielded is not None
        if is_due and has_source:
            self._batches, self._chosen = 0, {}
        return is_due and has_source

    def _agree(self, objection: str) -> None:
        """Raise UsageError on all ranks if one of them has an objection; note tables in which they
        differ, and branches that they take by themselves. Collective.
        """
        tables, self._rows.tables = self._rows.tables, []
        answers, self._rows.answers = self._rows.answers, {}
        # A loop asks of each sample by itself more than once.
        branches = {
            place: asked[0] for place, asked in answers.items() if len(asked) == 1 and place
        }
        if not self._is_due:
            self._rows.forget()
        self._rows.end_step()
        self._rows.mixed_place = ""
        told = self._data.all_gather_json([objection, tables, branches])
        for text, _, _ in told:
            if text:
                raise UsageError(text)
        for place in branches:
            if len({answer for *_, others in told for answer in others.get(place, ())}) > 1:
                self._note(BRANCH, place=place)
        for same in zip(*(tables for _, tables, _ in told), strict=False):
            places = {place for place, _ in same}
            if len(places) == 1 and len({digest for _, digest in same}) > 1:
                self._note(TABLE, place=places.pop())

    def skip(self) -> None:
        """Count a step for which a rank may mix its samples."""
        self._calls += 1
        self._batches, self._chosen = 0, {}
        self._rows.forget()

    @property
    def _is_due(self) -> bool:
        step = self._calls + 1
        return self.enabled and (step <= EARLY_STEPS or not step & (step - 1))

    def _mixes(self, tensors: Iterable[Tensor]) -> bool:
        same, replaced, rows = [], [], None
        for tensor in tensors:
            copies = self._copies_of(tensor)
            if copies is not None and tensor.dim() and (rows is None or rows is copies[2]):
                rows = copies[2]
                same.append(copies[0])
                replaced.append(copies[1])
        return rows is not None and mixes_rows(same, replaced, rows)

    def _tensors_of(self, batch: LocalBatch) -> Iterator[Tensor]:
        yield from tensors_in([batch.args, dict(batch.kwargs)])
        yield from tensors_of(batch.step.compute_loss)

    def _copies_of(self, tensor: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        copies = self._rows.copies_of(tensor)
        # Something unseen may have written into it.
        return copies if copies is not None and _same_bits(tensor, copies[0]) else None

    def _note_numbers(self, batch: LocalBatch) -> None:
        for number in self._tensors_of(batch):
            copies = None if number.dim() else self._copies_of(number)
            is_count = not (number.is_floating_point() or number.is_complex())
            if not (copies is None or is_count or _same_bits(*copies[:2])):
                self._note(ONE_NUMBER)

    def note_host_draws(self, rows: int) -> None:
        """Announce that the loop may have drawn a number for each sample, all ranks the same."""
        for place, sizes in self._rows.own_draws.items():
            if rows >= 2 and rows in sizes[:2]:
                self._note_host_draw(f"a torch.Generator of its own ({place})", rows)
        for kind in self._of_loop.drawn(rows) if rows >= 2 else ():
            self._note_host_draw(f"a {kind} of its own", rows)
        self._of_loop = LoopGenerators(None)
        before, self._generators = self._generators, None
        drawn = (0, 0) if before is None else before.drawn_until(HostGenerators.now())
        if max(drawn) >= rows >= 2:
            self._note_host_draw("Python" if drawn[0] >= rows else "NumPy", rows)

    def _note_host_draw(self, generator: str, rows: int) -> None:
        self._note(HOST_DRAWN, generator=generator, rows=rows)
        self.drawn = self.drawn or generator

    def _in_order(self, inputs: Any) -> bool:
        """Return True if inputs of a model are known to have samples where the batch has them."""
        for tensor in tensors_in(inputs):
            copies = self._copies_of(tensor) if tensor.dim() else None
            if copies is not None and len(tensor) == len(copies[2]):
                return lie_in_order(*copies)
        return False

    def _choose(self, samples: int, is_apart: bool = False) -> tuple[Tensor, Tensor]:
        """Choose which samples are replaced by which: about half of them, by some of the others.

        Args: is_apart: they are not known to lie where those of the batch do.
        """
        key = samples, is_apart
        if key not in self._chosen:
            generator = torch.Generator().manual_seed(self._calls)
            order = torch.randperm(samples, generator=generator, device="cpu")
            replaced, kept = order[: samples // 2], order[samples // 2 :]
            is_replaced = torch.zeros(samples, dtype=torch.bool, device="cpu")
            is_replaced[replaced] = True
            donors = torch.arange(samples, device="cpu")
            donors[replaced] = kept[: len(replaced)]
            self._chosen[key] = is_replaced, donors
        return self._chosen[key]


def _with_rows(batch: Any, samples: int) -> list[Tensor]:
    """Return the tensors of a batch that have its samples along dimension 0."""
    return [
        tensor
        for tensor in row_tensors({0: batch}, samples)
        if tensor.layout is torch.strided and tensor.shape[:1] == (samples,)
    ]


def _same_bits(one: Tensor, other: Tensor) -> bool:
    one, other = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(one, other)
