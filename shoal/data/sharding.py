"""From what a user gives as batches to a loader of this rank's rows of them.

DataLoader(map-style data)       DistributedBatchLoader    fetches by index
DataLoader(iterable data)        ┐
a list of batches, a generator   ├ StreamLoader            reads all, keeps its own rows
another library's loader         ┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from shoal.data.loader import DistributedBatchLoader
from shoal.data.sharded_loader import ShardedLoader
from shoal.data.stream_loader import StreamLoader
from shoal.errors import UsageError
from shoal.trace.recorder import Recorder


def shard_batches(
    batches: Any,
    rank: int,
    ranks: int,
    seed: int,
    recorder: Recorder | None = None,
    announce: Callable[[str], None] | None = None,
    gather: Callable[[str], list[str]] | None = None,
) -> ShardedLoader:
    """Return a loader of this rank's rows of the global batches.

    Args:
        batches: a DataLoader, or any iterable of global batches.
        rank, ranks: this rank and the number of ranks.
        seed: of the run.
        recorder: records the waiting time for each batch; None without a trace.
        announce: prints a note.
        gather: text -> the texts of all ranks; collective. With it, streams of data are compared
            between the ranks.

    Raises: UsageError: no batches can be had of it, or each rank would get other samples.
    """
    if isinstance(batches, DataLoader) and not isinstance(batches.dataset, IterableDataset):
        return DistributedBatchLoader(batches, rank, ranks, seed, recorder, announce)
    if not is_source(batches):
        raise UsageError(
            f"{type(batches).__name__} gives no batches. Use a DataLoader, or any iterable of "
            "global batches, such as a list or a generator."
        )
    return StreamLoader(batches, rank, ranks, seed, recorder, announce, gather)


def is_source(value: Any) -> bool:
    """Return True for what `shard_batches` takes: a DataLoader or another iterable of batches."""
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, dict))
