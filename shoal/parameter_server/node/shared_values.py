"""Where the values of a server lie, so that workers of the same machine can read them.

    slot 0   the values, as the shard steps them    synchronous steps: workers read them here, for nobody changes them
                                                    before everyone has
    slot 1   worker 0's copy                        stale steps: values change at any time, so each worker has a copy
    slot 2   worker 1's copy

Every slot has room for the whole model; only what is held takes any.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shoal.parameter_server.partitioning import Partition, offsets
from shoal.shm_backend.segment import SharedSegment


def slot_of(worker: int, staleness: int | None) -> int:
    """The slot that a worker reads."""
    return 0 if staleness == 0 else 1 + worker


def read_offsets(parts: Sequence[Partition], worker: int, staleness: int | None) -> list[int]:
    """Where in a server's memory a worker reads each part, in bytes."""
    places, slot_bytes = offsets(parts)
    begin = slot_of(worker, staleness) * slot_bytes
    return [begin + places[part.number] for part in parts]


class SharedValues:
    """One server's.

    Attributes: memory: which workers are to find.
    """

    def __init__(self, parts: Sequence[Partition], workers: int, staleness: int | None) -> None:
        self._parts = {part.number: part for part in parts}
        self._places, self._slot_bytes = offsets(parts)
        self._count = 1 if staleness == 0 else 1 + workers
        self._starts_of_copies = [
            slot_of(worker, staleness) * self._slot_bytes for worker in range(workers)
        ]
        self.memory = SharedSegment(self._count * self._slot_bytes)

    def values(self, part: Partition) -> Tensor:
        """Where the values of a part are stepped."""
        return self.memory.tensor(self._places[part.number], part.length, part.dtype)

    def copy(self, worker: int, number: int, values: Tensor) -> Tensor:
        """A part's values, where this worker reads them until it asks again."""
        if self._count == 1:
            return values
        part = self._parts[number]
        at = self._starts_of_copies[worker] + self._places[number]
        return self.memory.tensor(at, part.length, part.dtype).copy_(values)

    def discard(self, part: Partition) -> None:
        """Give the memory of a part back to the machine."""
        for slot in range(self._count):
            self.memory.release_pages(
                slot * self._slot_bytes + self._places[part.number], part.size_bytes
            )
