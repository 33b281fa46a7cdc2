"""The view that a data set has of its process: its DataLoader worker, and its rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker

RANK_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("NODE_RANK", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_LOCALID"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    *("PMI_RANK", "PMI_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
)


def set_worker_info(number: int, num_workers: int, seed: int, dataset: Any) -> None:
    """Let `get_worker_info` of this worker process return another number and data set.

    Why: torch sets it before a data set is read, and has no public setter. Without: an epoch that
    is resumed could not begin with the worker whose turn it is, and a user's `worker_init_fn` would
    be shown Shoal's data set in the place of its own. Checked: 2.13.
    """
    assert get_worker_info() is not None, "not in a DataLoader worker"
    worker._worker_info = worker.WorkerInfo(
        id=number, num_workers=num_workers, seed=seed, dataset=dataset
    )


@contextmanager
def as_only_process() -> Iterator[None]:
    """Hide the ranks in the block: no default process group, no launcher's variables.

    Why: WebDataset and data sets of users take their share by these, where Shoal shares out global
    batches itself; only torch's own variable says that there is a group. Without: each rank would
    drop samples that no other rank has. Checked: 2.13.
    """
    hidden = {name: os.environ.pop(name) for name in RANK_VARIABLES if name in os.environ}
    group = dist.GroupMember.WORLD
    dist.GroupMember.WORLD = None
    try:
        yield
    finally:
        dist.GroupMember.WORLD = group
        os.environ.update(hidden)
