"""Whether what data-loader workers hand over fits into /dev/shm.

      worker 0   batch  batch ─┐
      worker 1   batch  batch ─┼─ /dev/shm ──> the rank, which holds one more
      ...                      ┘

A container has 64 MiB of it unless told otherwise. A worker that finds no room dies of SIGBUS in
the middle of a run."""

from __future__ import annotations

import math
import os
import shutil

from shoal.config.job import Job
from shoal.data.source import Source
from shoal.errors import ConfigError

AHEAD = 2  # batches that a worker has ready, in torch's DataLoader
PLACE = "/dev/shm"


def refuse_little_shared_memory(job: Job, source: Source, free_bytes: int | None) -> None:
    """Args: free_bytes: that the workers of all ranks on this machine may fill; None where nobody
    can tell.

    Raises: ConfigError: they need more.
    """
    needed_bytes = _needed_bytes(job, source)
    if free_bytes is None or needed_bytes <= free_bytes:
        return
    needed, free = f"{needed_bytes / 2**20:,.0f} MiB", f"{free_bytes / 2**20:,.0f} MiB"
    raise ConfigError(
        [
            f"data.workers: batches on their way from {job.data.workers} workers of each rank need "
            f"{needed} of {PLACE}, which has {free} free; a worker that finds no room is killed "
            "(SIGBUS). Use fewer data.workers (0 needs none) or a smaller batch, or give the "
            f"container more: docker run --shm-size={2 * needed_bytes >> 20}m."
        ]
    )


def free_shared_bytes() -> int | None:
    """Room in /dev/shm; None where there is none, or it has no limit."""
    room = shutil.disk_usage(PLACE) if os.path.isdir(PLACE) else None
    return room.free if room is not None and room.total else None


def _needed_bytes(job: Job, source: Source) -> int:
    """On this machine, with all workers as far ahead as they go; those for training stay while
    others evaluate.
    """
    if not job.data.workers:
        return 0
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) / int(os.environ.get("WORLD_SIZE", "1"))
    numbers = math.prod(source.input_shape)
    sample_bytes = 16 * numbers if source.task == "language" else 4 * numbers
    samples = job.train.batch_size + job.evaluation.batch_size
    # All workers of a rank have batches of the rank's share of the global batch.
    return math.ceil((AHEAD * job.data.workers + 1) * samples * sample_bytes * here)
