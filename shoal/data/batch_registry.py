"""Find the shard that a batch came with, though a loop may have fetched later batches already.

    loader   yields batch 1 (shard 1), batch 2 (shard 2), ...     key: the tensors of a batch
    loop     computes on batch 1                                  shard 1, though 2 was yielded last

A tensor is found by identity, as the base of a view, and after `Run.move`; never by its values.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from shoal.data.batch_shards import BatchShard
from shoal.data.tree_map import tensors_in
from shoal.platform.torch_private.tensor_state import base


class BatchRegistry:
    """Remembers shares for as long as the tensors of their batches live.

    Attributes:
        sizes: (rows, global rows) of every share so far.
    """

    def __init__(self) -> None:
        self.sizes: set[tuple[int, int]] = set()
        self._shares: dict[int, BatchShard | None] = {}  # by the id of a tensor that lives

    def remember(self, batch: Any, share: BatchShard) -> None:
        """`batch` was yielded with `share`."""
        self.sizes.add(_size(share))
        for tensor in tensors_in(batch):
            before = self._shares.get(id(tensor), share)
            # A tensor that comes with every batch tells nothing.
            self._keep(
                tensor, share if before is not None and _size(before) == _size(share) else None
            )

    def track(self, tensor: Tensor, moved: Tensor) -> None:
        """`moved` is `tensor` on another device."""
        share = self._share_of(tensor)
        if share is not None and moved is not tensor:
            self._keep(moved, share)

    def shard_sizes_of(self, tensors: Iterable[Tensor]) -> list[BatchShard]:
        """Shares of different size that these tensors came with: one for a batch, none for what
        is not known.
        """
        found = [share for share in map(self._share_of, tensors) if share is not None]
        return list({_size(share): share for share in found}.values())

    def _keep(self, tensor: Tensor, share: BatchShard | None) -> None:
        if id(tensor) not in self._shares:
            weakref.finalize(tensor, self._shares.pop, id(tensor)).atexit = False
        self._shares[id(tensor)] = share

    def _share_of(self, tensor: Tensor) -> BatchShard | None:
        share = self._shares.get(id(tensor))
        whole = base(tensor)
        return self._shares.get(id(whole)) if share is None and whole is not None else share


def _size(share: BatchShard) -> tuple[int, int]:
    return share.rows, share.global_rows
