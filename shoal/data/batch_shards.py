"""Divide each global batch among the ranks.

      order of epoch 3   17 4 90 2 | 55 8 13 71 | 6 29       10 samples, global batches of 4
      rank 0 of 2        17 4      | 55 8       | 6          contiguous and nearly equal; the first
      rank 1 of 2             90 2 |      13 71 |   29       ranks take the remainder

The order is a function of (seed, epoch) alone, so the samples of step t are the same for every
number of ranks."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shoal.data.tree_map import (
    IsSamples,
    mark_sample_lists,
    nothing_known,
    rows_of,
    take_rows,
    tensors_in,
)
from shoal.platform.torch_private.tensor_state import base


@dataclass(frozen=True)
class BatchShard:
    """One rank's rows of one global batch."""

    epoch: int
    stop: int
    """Position in the epoch after this global batch: samples, or batches where a batch comes
    ready-made."""
    rows: int
    """Samples that count; 0 for a rank whose only row is a stand-in."""
    global_rows: int
    indices: tuple[Hashable, ...] = ()
    """Indices of the global batch; empty where samples are not fetched by index."""


def row_window(rows: int, rank: int, ranks: int) -> slice:
    """Return the rows of a global batch that belong to `rank`; empty if there are too few."""
    base, extra = divmod(rows, ranks)
    begin = rank * base + min(rank, extra)
    return slice(begin, begin + base + (rank < extra))


def share_batch(
    batch: Any,
    rank: int,
    ranks: int,
    rows: int | None = None,
    is_samples: IsSamples = nothing_known,
) -> tuple[Any, BatchShard]:
    """Return this rank's rows of a global batch, and the shard that says how many they are.

    A rank without rows gets the first row, and a shard of 0 rows.

    Args:
        batch: a nest of tensors that is the same on all ranks; see `tree_map`.
        rows: samples in `batch`; None to tell them from its tensors.
        is_samples: tells what lists of dicts hold.

    Raises: UsageError: the number of samples cannot be told, or a tensor has another one.
    """
    if ranks > 1:
        batch = mark_sample_lists(batch, is_samples)
    rows = rows_of(batch) if rows is None else rows
    window = row_window(rows, rank, ranks)
    count = window.stop - window.start
    if rows == 0:
        return batch, BatchShard(0, 0, 0, 0)
    # Collectives need every rank: one without rows computes on a stand-in of weight zero.
    local = take_rows(batch, window if count else slice(0, 1), rows)
    return local, BatchShard(0, 0, count, rows)


class BatchRegistry:
    """Remember shards for as long as the tensors of their batches live.

    So the shard is found that a batch came with, though a loop may have fetched later ones already.

        loader   yields batch 1 (shard 1), batch 2 (shard 2), ...     key: the tensors of a batch
        loop     computes on batch 1                                  shard 1, though 2 came last

    A tensor is found by identity, as the base of a view, and after `Run.move`; never by its values.

    Attributes:
        last: the shard of the last batch; None before the first.
        sizes: (rows, global rows) of every shard so far.
    """

    def __init__(self) -> None:
        self.last: BatchShard | None = None
        self.sizes: set[tuple[int, int]] = set()
        # Key: the id of a live tensor. None: a tensor of batches of different sizes.
        self._shards: dict[int, BatchShard | None] = {}

    def remember(self, batch: Any, shard: BatchShard) -> None:
        """Record that `batch` was yielded with `shard`."""
        self.last = shard
        self.sizes.add(_size(shard))
        for tensor in tensors_in(batch):
            # A tensor that comes with batches of different sizes identifies none of them.
            previous = self._shards.get(id(tensor), shard)
            same_size = previous is not None and _size(previous) == _size(shard)
            self._save(tensor, shard if same_size else None)

    @property
    def is_kept(self) -> bool:
        """Return True if tensors of more than two batches live.

        Of a loop that keeps none there are the last, and one that a frame's `f_locals` still has.
        """
        return len({id(shard) for shard in self._shards.values()}) > 2

    def track(self, tensor: Tensor, moved: Tensor) -> None:
        """Record that `moved` is `tensor` on another device."""
        shard = self.shard_of(tensor)
        if shard is not None and moved is not tensor:
            self._save(moved, shard)

    def _save(self, tensor: Tensor, shard: BatchShard | None) -> None:
        if id(tensor) not in self._shards:
            # An id may be used again after the tensor has died, so its entry must go with it.
            weakref.finalize(tensor, self._shards.pop, id(tensor)).atexit = False
        self._shards[id(tensor)] = shard

    def shard_of(self, tensor: Tensor) -> BatchShard | None:
        """Return the shard that a tensor came with; None for one that is not known."""
        shard = self._shards.get(id(tensor))
        if shard is not None:
            return shard
        view_base = base(tensor)
        return None if view_base is None else self._shards.get(id(view_base))


def _size(shard: BatchShard) -> tuple[int, int]:
    return shard.rows, shard.global_rows
