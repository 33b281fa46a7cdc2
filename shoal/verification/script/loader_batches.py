"""Batches of a script's own loaders: recorded on many ranks, and given to one process joined.

    rank 0   DataLoader yields  rows 0 2      ─┐
    rank 1   DataLoader yields  rows 1 3      ─┴─ one process: its DataLoader yields rows 0 2 1 3

A loader is known by the order in which loaders were made. Ranks that yield the same batch, as those
of one tensor group do, count once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from shoal.data.tree_map import tensors_in, tree_map
from shoal.errors import UsageError
from shoal.verification.script.batch_axes import axes_of_batches, batches_of_ranks, equal
from shoal.verification.script.run_record import RankRecord, RecordWriter
from shoal.verification.script.watched_calls import watch


class LoaderOrder:
    """Numbers loaders in the order of their making, from `start` on."""

    def __init__(self) -> None:
        self._numbers: weakref.WeakKeyDictionary[DataLoader, int] = weakref.WeakKeyDictionary()
        self._count = 0

    def start(self, stack: ExitStack) -> None:
        """Number loaders until the stack is closed."""
        watch(stack, DataLoader, "__init__", self._made)

    def _made(self, original: Any, loader: DataLoader, *args: Any, **kwargs: Any) -> None:
        if loader not in self._numbers:
            self._numbers[loader] = self._count
            self._count += 1
        original(loader, *args, **kwargs)

    def number(self, loader: DataLoader) -> int:
        """Return the number of a loader, from 0."""
        return self._numbers.get(loader, -1)


class BatchTape:
    """Records the batches that a script takes from its loaders.

    Args:
        writer: of the record.
        record: the index of this rank; loaders of Shoal's scripts are left alone.
    """

    def __init__(self, writer: RecordWriter, record: RankRecord) -> None:
        self._writer = writer
        self._record = record
        self._order = LoaderOrder()
        self._rounds: dict[int, int] = {}

    def start(self, stack: ExitStack) -> None:
        """Record until the stack is closed."""
        self._order.start(stack)
        watch(stack, DataLoader, "__iter__", self._recorded)

    def _recorded(self, original: Any, loader: DataLoader) -> Iterator[Any]:
        number = self._order.number(loader)
        if self._record.by_shoal or number < 0:
            return iter(original(loader))
        return self._taken(number, original(loader))

    def _taken(self, number: int, batches: Any) -> Iterator[Any]:
        turn = self._rounds[number] = self._rounds.get(number, -1) + 1
        self._record.loaders.append(f"{number}-{turn}")
        for position, batch in enumerate(batches):
            leaves = {str(index): leaf for index, leaf in enumerate(tensors_in(batch))}
            self._writer.batch(f"{number}-{turn}-{position}", leaves)
            yield batch


class JoinedBatches:
    """Lets the loaders of one process yield the batches that many ranks have recorded.

    Args:
        folder: of the record of the ranks.
        ranks: their indices; loaders of Shoal's scripts are left alone.
    """

    def __init__(self, folder: Path, ranks: Sequence[RankRecord]) -> None:
        self._folder = folder
        axes = axes_of_batches(folder, ranks)
        self._members = [record for record in ranks if axes[record.rank]["tensor"][0] == 0]
        self._enabled = not ranks[0].by_shoal
        self._order = LoaderOrder()
        self._rounds: dict[int, int] = {}

    def start(self, stack: ExitStack) -> None:
        """Give joined batches until the stack is closed."""
        self._order.start(stack)
        watch(stack, DataLoader, "__iter__", self._joined)
        watch(stack, DataLoader, "__len__", self._shorter)

    def _joined(self, original: Any, loader: DataLoader) -> Iterator[Any]:
        number = self._order.number(loader)
        if not self._enabled or number < 0:
            return iter(original(loader))
        return self._given(number, original(loader))

    def _shorter(self, original: Any, loader: DataLoader) -> int:
        count: int = original(loader)
        if not self._enabled or not self._is_shared_out(self._order.number(loader)):
            return count
        return -(-count // len(self._members))

    def _given(self, number: int, own: Any) -> Iterator[Any]:
        turn = self._rounds[number] = self._rounds.get(number, -1) + 1
        for position, batch in enumerate(own):
            parts = self._parts(number, f"{number}-{turn}-{position}")
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
                "given as one batch. Pad to one length."
            )
        else:
            joined.append(torch.cat(list(column)))
    return joined


def _replaced(batch: Any, leaves: Iterator[Tensor]) -> Any:
    """Return a batch of the same structure with other tensors."""
    if isinstance(batch, Tensor):
        return next(leaves)
    return tree_map(batch, lambda item: _replaced(item, leaves))
