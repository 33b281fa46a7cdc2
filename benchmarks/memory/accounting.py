"""Counts the bytes of tensors that are alive: what a process holds, not what its allocator keeps.

Every operation's results are noticed by their storage, and forgotten when it dies. Storages that a strategy empties for
a while, as `fully_shard` does with gathered parameters, count for what they hold at that moment.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """Inside, `peak_bytes` is the most that tensors held at once, of those in `held` and those made since."""

    def __init__(self, held: Iterable[Tensor]) -> None:
        super().__init__()
        self.storages: WeakSet[torch.UntypedStorage] = WeakSet()
        self.peak_bytes = 0
        for tensor in held:
            self._notice(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, Tensor):
                self._notice(result)
        self.peak_bytes = max(self.peak_bytes, sum(storage.nbytes() for storage in list(self.storages)))
        return results

    def _notice(self, tensor: Tensor) -> None:
        self.storages.add(_local(tensor).untyped_storage())


def held_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes behind `tensors` on this rank, each memory once."""
    storages = {_local(t).untyped_storage().data_ptr(): _local(t).untyped_storage() for t in tensors if t is not None}
    return sum(storage.nbytes() for storage in storages.values())


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
