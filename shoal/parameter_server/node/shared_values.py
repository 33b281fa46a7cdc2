"""Shared memory of a server's values, which workers of the same host read.

    slot 0   the values that the shard steps    read by workers in synchronous steps: the values
                                                cannot change before every worker has read them
    slot 1   worker 0's copy                    read in asynchronous steps: values may change at
    slot 2   worker 1's copy                    any time, so each worker has a copy

Each slot has addresses for the full model. Only the partitions that this server holds take memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shoal.parameter_server.partitioning import Partition, offsets
from shoal.shm_backend.segment import SharedSegment


def slot_of(worker: int, staleness: int | None) -> int:
    """Return the slot that a worker reads."""
    return 0 if staleness == 0 else 1 + worker


def read_offsets(parts: Sequence[Partition], worker: int, staleness: int | None) -> list[int]:
    """Return where a worker reads each partition in a server's memory, in bytes."""
    partition_offsets, slot_bytes = offsets(parts)
    start = slot_of(worker, staleness) * slot_bytes
    return [start + partition_offsets[part.number] for part in parts]


class SharedValues:
    """Values of one server.

    Attributes:
        memory: its description lets workers of this host map it.
    """

    def __init__(self, parts: Sequence[Partition], workers: int, staleness: int | None) -> None:
        self._layouts = {part.number: part for part in parts}
        self._offsets, self._slot_bytes = offsets(parts)
        self._slots = 1 if staleness == 0 else 1 + workers
        self._copy_starts = [
            slot_of(worker, staleness) * self._slot_bytes for worker in range(workers)
        ]
        self.memory = SharedSegment(self._slots * self._slot_bytes)

    def values(self, part: Partition) -> Tensor:
        """Return the memory in which a partition's values are stepped: flat, of its dtype."""
        return self.memory.tensor(self._offsets[part.number], part.length, part.dtype)

    def copy(self, worker: int, partition: int, values: Tensor) -> Tensor:
        """Copy a partition's values to where this worker reads them before its next request."""
        if self._slots == 1:
            return values
        layout = self._layouts[partition]
        start = self._copy_starts[worker] + self._offsets[partition]
        return self.memory.tensor(start, layout.length, layout.dtype).copy_(values)

    def discard(self, part: Partition) -> None:
        """Return the memory of a partition to the operating system."""
        for slot in range(self._slots):
            start = slot * self._slot_bytes + self._offsets[part.number]
            self.memory.release_pages(start, part.size_bytes)
