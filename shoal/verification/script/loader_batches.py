"""Batches of a script's own loaders: recorded on many ranks, and given to one process joined.

    rank 0   DataLoader yields  rows 0 2      ─┐
    rank 1   DataLoader yields  rows 1 3      ─┴─ one process: its DataLoader yields rows 0 2 1 3

A loader is known by the order in which loaders were made. Ranks that yield the same batch count
once: those of one tensor group, or the stages of a pipeline, or it is an error.

rank 0   rows 0-3   embed, block 0      ─┐ one batch, other modules: stages
rank 1   rows 0-3   block 1, head       ─┘
rank 0   rows 0-3   all modules         ─┐ one batch, the same outputs, no message on the way:
rank 1   rows 0-3   all modules         ─┘ nothing shares the samples out
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from shoal.data.tree_map import tensors_in, tree_map
from shoal.errors import UsageError
from shoal.verification.script.run_record import RankRecord, RecordWriter, recorded
from shoal.verification.script.watched_calls import watch


def axes_of_batches(folder: Path, ranks: Sequence[RankRecord]) -> list[dict[str, Any]]:
    """Return for each rank its axes: ranks of the same batches are a tensor group.

    The first batch of each loader counts, and what the first step gives to the model, for scripts
    that take batches from elsewhere. The stages of a pipeline are one group: they take one batch
    and call different modules, each on what another one has sent.
    """
    loops = list(dict.fromkeys(loop for record in ranks for loop in record.loaders))
    columns = [batches_of_ranks(folder, ranks, f"{loop}-0") for loop in loops]
    taken = [[t for column in columns for t in column[rank] or ()] for rank in range(len(ranks))]
    groups: list[list[int]] = []
    for rank, record in enumerate(ranks):
        for members in groups:
            other = ranks[members[0]]
            is_stage = bool(taken[rank]) and are_stages(record, other)
            if equal(taken[rank], taken[members[0]]) and (
                is_stage or equal(inputs(record), inputs(other))
            ):
                members.append(rank)
                break
        else:
            groups.append([rank])
    axes: list[dict[str, Any]] = [{} for _ in ranks]
    for index, members in enumerate(groups):
        for place, rank in enumerate(members):
            axes[rank] = {"data": (index, len(groups)), "tensor": (place, len(members))}
    return axes


def are_stages(one: RankRecord, other: RankRecord) -> bool:
    """Return True if the first step calls no module on both of two ranks."""
    called = [{c.module for c in r.steps[0].calls} - {""} for r in (one, other) if r.steps]
    return len(called) == 2 and all(called) and called[0].isdisjoint(called[1])


def inputs(record: RankRecord, step: int = 1) -> list[Tensor]:
    """Return numbers that tell apart what a step gives to the model."""
    digests = record.steps[step - 1].digests if len(record.steps) >= step else {}
    return [torch.tensor(value) for name, value in digests.items() if name.startswith("input/")]


def batches_of_ranks(
    folder: Path, ranks: Sequence[RankRecord], key: str
) -> list[list[Tensor] | None]:
    """Return the tensors of one batch on each rank; None where a rank took none."""
    found: list[list[Tensor] | None] = []
    for record in ranks:
        tensors = recorded(folder, record.rank, f"batches/{key}")
        found.append([tensors[name] for name in sorted(tensors.names, key=int)] or None)
    return found


def equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Return True if two lists hold equal tensors of the same dtypes."""
    return len(one) == len(other) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


def repeat_samples(folder: Path, ranks: Sequence[RankRecord]) -> bool:
    """Return True if all ranks compute the same outputs of the same samples, each on its own.

    Ranks of a tensor group compute the same samples too, but send messages while they do.
    """
    steps = min(len(record.steps) for record in ranks)
    if len(ranks) < 2 or not steps or not inputs(ranks[0]):
        return False
    if any(step.collectives != 0 for record in ranks for step in record.steps):
        return False
    outputs = (recorded(folder, record.rank, "step-1").below("forward") for record in ranks)
    first = next(outputs)
    return bool(first) and all(
        first.keys() == other.keys()
        and equal([*first.values()], [*other.values()])
        and all(equal(inputs(record, n), inputs(ranks[0], n)) for n in range(1, steps + 1))
        for record, other in zip(ranks[1:], outputs, strict=True)
    )


class LoaderLoops:
    """Loops over the loaders of a script, which are numbered in the order of their making."""

    def __init__(self) -> None:
        self._numbers: weakref.WeakKeyDictionary[DataLoader, int] = weakref.WeakKeyDictionary()
        self._count = 0
        self._turns: Counter[int] = Counter()

    def start(self, stack: ExitStack) -> None:
        """Let `_loop` give what loaders yield, until the stack is closed."""
        watch(stack, DataLoader, "__init__", self._made)
        watch(stack, DataLoader, "__iter__", self._iterate)

    def _made(self, original: Any, loader: DataLoader, *args: Any, **kwargs: Any) -> None:
        if loader not in self._numbers:
            self._numbers[loader] = self._count
            self._count += 1
        original(loader, *args, **kwargs)

    def _iterate(self, original: Any, loader: DataLoader) -> Iterator[Any]:
        number, batches = self._numbers.get(loader), iter(original(loader))
        return batches if number is None else self._loop(number, batches)

    def _begin(self, number: int) -> str:
        """Return the name of a new loop over a loader: its number, and that of the loop."""
        self._turns[number] += 1
        return f"{number}-{self._turns[number] - 1}"

    def _loop(self, number: int, batches: Iterator[Any]) -> Iterator[Any]:
        raise NotImplementedError


class BatchTape(LoaderLoops):
    """Records the batches that a script takes from its loaders.

    Args:
        writer: of the record.
        record: the index of this rank; loaders of Shoal's scripts are left alone.
    """

    def __init__(self, writer: RecordWriter, record: RankRecord) -> None:
        super().__init__()
        self._writer = writer
        self._record = record

    def _loop(self, number: int, batches: Iterator[Any]) -> Iterator[Any]:
        if self._record.by_shoal:
            yield from batches
            return
        loop = self._begin(number)
        self._record.loaders.append(loop)
        for position, batch in enumerate(batches):
            leaves = {str(index): leaf for index, leaf in enumerate(tensors_in(batch))}
            self._writer.write(f"batches/{loop}-{position}", leaves)
            yield batch


class JoinedBatches(LoaderLoops):
    """Lets the loaders of one process yield the batches that many ranks have recorded.

    Args:
        folder: of the record of the ranks.
        ranks: their indices; loaders of Shoal's scripts are left alone.
    """

    def __init__(self, folder: Path, ranks: Sequence[RankRecord]) -> None:
        super().__init__()
        self._folder = folder
        self._by_shoal = ranks[0].by_shoal
        axes = axes_of_batches(folder, ranks)
        self._members = [record for record in ranks if axes[record.rank]["tensor"][0] == 0]

    def start(self, stack: ExitStack) -> None:
        """Give joined batches until the stack is closed."""
        if not self._by_shoal:
            super().start(stack)
            watch(stack, DataLoader, "__len__", self._shorter)

    def _shorter(self, original: Any, loader: DataLoader) -> int:
        count: int = original(loader)
        if not self._is_shared_out(self._numbers.get(loader, -1)):
            return count
        return -(-count // len(self._members))

    def _loop(self, number: int, batches: Iterator[Any]) -> Iterator[Any]:
        loop = self._begin(number)
        for position, batch in enumerate(batches):
            parts = self._parts(number, f"{loop}-{position}")
            if not parts:
                return  # the ranks took no further batch
            yield _replaced(batch, iter(join(parts)))

    def _parts(self, number: int, key: str) -> list[list[Tensor]]:
        """Return the batches of all data ranks that took one."""
        members = self._members if self._is_shared_out(number) else self._members[:1]
        found = batches_of_ranks(self._folder, members, key)
        return [batch for batch in found if batch is not None]

    def _is_shared_out(self, number: int) -> bool:
        """Return False for a loader of which every rank takes all, for an evaluation say."""
        first, *others = batches_of_ranks(self._folder, self._members, f"{number}-0-0")
        return first is None or any(b is None or not equal(first, b) for b in others)


def join(parts: Sequence[list[Tensor]]) -> list[Tensor]:
    """Return the tensors of several ranks' batches, joined along dimension 0.

    Raises: UsageError: they have other shapes.
    """
    if len(parts) == 1:
        return parts[0]
    joined = []
    for column in zip(*parts, strict=True):
        shapes = {tensor.shape[1:] for tensor in column}
        if column[0].dim() == 0:
            joined.append(column[0])
        elif len(shapes) > 1:
            found = " and ".join(str(tuple(tensor.shape)) for tensor in column)
            raise UsageError(
                f"verify: the ranks' batches have shapes {found}, which one process cannot be "
                "given as one batch. For the proof pad to one length, as with padding='max_length'."
            )
        else:
            joined.append(torch.cat(list(column)))
    return joined


def _replaced(batch: Any, leaves: Iterator[Tensor]) -> Any:
    """Return a batch of the same structure with other tensors."""
    if isinstance(batch, Tensor):
        return next(leaves)
    return tree_map(batch, lambda item: _replaced(item, leaves))
