"""A check that the batches of data-loader workers fit into /dev/shm.

      worker 0   batch  batch ─┐
      worker 1   batch  batch ─┼─ /dev/shm ──> the rank, which holds one more batch
      ...                      ┘

A container has 64 MiB of it by default. A worker that finds no room there is killed by SIGBUS in
the middle of a run. So the need is estimated before training.
"""

from __future__ import annotations

import math
import os
import shutil

from shoal.config.job import Job
from shoal.data.source import Source
from shoal.errors import ConfigError

PREFETCH_FACTOR = 2
"""Batches that a worker prepares ahead, the default of torch's DataLoader."""
SHM_DIRECTORY = "/dev/shm"


def check_shared_memory(job: Job, source: Source, free_bytes: int | None) -> None:
    """Check that there is room for the workers of all ranks on this machine.

    Args:
        free_bytes: room for them; None if that is unknown.

    Raises:
        ConfigError: they need more.
    """
    needed_bytes = _needed_bytes(job, source)
    if free_bytes is None or needed_bytes <= free_bytes:
        return
    needed, free = f"{needed_bytes / 2**20:,.0f} MiB", f"{free_bytes / 2**20:,.0f} MiB"
    raise ConfigError(
        [
            f"data.workers: batches on their way from {job.data.workers} workers of each rank need "
            f"{needed} of {SHM_DIRECTORY}, which has {free} free; a worker that finds no room is "
            "killed (SIGBUS). Use fewer data.workers (0 needs none) or a smaller batch, or give "
            f"the container more: docker run --shm-size={2 * needed_bytes >> 20}m."
        ]
    )


def free_shared_bytes() -> int | None:
    """Return the room in /dev/shm; None if it does not exist or has no limit."""
    room = shutil.disk_usage(SHM_DIRECTORY) if os.path.isdir(SHM_DIRECTORY) else None
    return room.free if room is not None and room.total else None


def _needed_bytes(job: Job, source: Source) -> int:
    """Return the bytes of all batches on this machine, if all workers are as far ahead as can be.

    Workers for training stay while those for evaluation run, so both count.
    """
    if not job.data.workers:
        return 0
    share_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) / int(
        os.environ.get("WORLD_SIZE", "1")
    )
    num_values = math.prod(source.input_shape)
    # A text has int64 tokens as input and as target, an image float32 pixels.
    sample_bytes = 16 * num_values if source.task == "language" else 4 * num_values
    samples = job.train.batch_size + job.evaluation.batch_size
    # A batch in a worker is the rank's share of the global batch, so the ranks sum to it.
    return math.ceil((PREFETCH_FACTOR * job.data.workers + 1) * samples * sample_bytes * share_here)
