"""Find the shard that a batch came with, though a loop may have fetched later batches already.

    loader   yields batch 1 (shard 1), batch 2 (shard 2), ...     key: the tensors of a batch
    loop     computes on batch 1                                  shard 1, though 2 was yielded last

A tensor is found by identity, as the base of a view, and after `Run.move`; never by its values.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from shoal.data.batch_shards import BatchShard
from shoal.data.tree_map import tensors_in
from shoal.platform.torch_private.tensor_state import base


class BatchRegistry:
    """Remember shards for as long as the tensors of their batches live.

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
