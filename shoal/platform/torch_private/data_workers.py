"""Workers of a DataLoader: their end, and the view that a data set has of its process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter


def set_worker_info(number: int, num_workers: int, seed: int, dataset: Any) -> None:
    """Let `get_worker_info` of this worker process return another number and data set.

    Why: torch sets it before a data set is read, and has no public setter. Without: an epoch that
    is resumed could not begin with the worker whose turn it is, and a user's `worker_init_fn` would
    be shown Shoal's data set in the place of its own. Checked: 2.11, 2.13, 2.15.
    """
    assert get_worker_info() is not None, "not in a DataLoader worker"
    worker._worker_info = worker.WorkerInfo(
        id=number, num_workers=num_workers, seed=seed, dataset=dataset
    )


def end_workers(iterator: Any) -> None:
    """End the worker processes of a DataLoader's iterator, if it has some. Nothing reads it again.

    Why: torch ends them when the iterator is deleted, and offers no other way. Without: an iterator
    that something holds when the process ends keeps its workers. Checked: 2.11, 2.13, 2.15.
    """
    if isinstance(iterator, _MultiProcessingDataLoaderIter):
        iterator._shutdown_workers()


@contextmanager
def without_default_group() -> Iterator[None]:
    """Let `torch.distributed.is_initialized` return False in the block.

    Why: a data set asks it to take its rank's share, and nothing but torch's own variable answers.
    Without: each rank would drop samples that no other rank has. Checked: 2.11, 2.13, 2.15.
    """
    group = dist.GroupMember.WORLD
    dist.GroupMember.WORLD = None
    try:
        yield
    finally:
        dist.GroupMember.WORLD = group
