"""Room for torch's buffers in memory that all ranks of the host can read: a collective need not copy them first.

      rank 0's room    [ all-gather ][ reduce-scatter ][ free .......... ]      rank 0 writes, all others read
      rank 1's room    [ all-gather ][ free ][ reduce-scatter ][ free .. ]      each has an order of its own

A room is as large as this rank's share of the machine, and takes what has been written: nothing at first. A tensor's
place is free again when torch lets go of it; the first place that is large enough is taken, so that warm pages are used
again. What does not fit lies elsewhere, and is copied as ever.

A process that is forked from a rank does not have the room: what it wrote would be the rank's. Reading a gradient that
lies there ends it (SIGSEGV).
"""

from __future__ import annotations

import mmap
import os
import resource
import threading
import weakref
from bisect import insort
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shoal.comm.backend.moved import TABLE_WORDS, Moved, Theirs
from shoal.comm.memory import Attached, Memory

NOWHERE, NEW, MOVED_BITS = 0, 1 << 62, 48


class Room:
    """This rank's own.

    Args: memory: nothing else is in it. size_bytes: of it.

    Attributes:
        moved: tensors that lie in memory of their own; the first page says where.
    """

    def __init__(self, memory: Memory, size_bytes: int) -> None:
        self.memory = memory
        self.moved = Moved(memory.raw(0, 8 * TABLE_WORDS).cast("q"))
        self._begin = memory.head_address(0)
        self._end = self._begin + size_bytes
        self._free = [(mmap.PAGESIZE, size_bytes)]  # from, to; in order, none next to another
        self._left: deque[tuple[int, int]] = deque()  # let go of, by whatever thread, even in the middle of `tensor`
        self._lock = threading.Lock()

    def tensor(self, length: int, dtype: torch.dtype) -> Tensor | None:
        """A flat tensor with anything in it; None where there is no room for it, or it is empty."""
        size_bytes = length * dtype.itemsize
        if not size_bytes:
            return None
        with self._lock:
            begin = self._take(-(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        if begin is None:
            return None
        block = np.frombuffer(self.memory.raw(begin, size_bytes), np.uint8)  # lives as long as the tensor's storage
        end = begin + -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        weakref.finalize(block, self._left.append, (begin, end)).atexit = False
        return torch.frombuffer(block, dtype=dtype, count=length)

    def place(self, tensor: Tensor) -> int:
        """Where a contiguous tensor lies, as a number above 0; NOWHERE where others cannot read it.

        62      61 ......... 48    47 ........... 0
        NEW     of those moved     bytes from its beginning, or from the room's
        """
        begin = tensor.data_ptr()
        if self._begin <= begin and begin + tensor.nbytes <= self._end:
            return begin - self._begin
        if (found := self.moved.find(tensor)) is not None:
            number, at_bytes = found
            new = 0 if number in self.moved.opened else NEW
            return new | number + 1 << MOVED_BITS | at_bytes
        return NOWHERE

    def _take(self, size_bytes: int) -> int | None:
        while self._left:
            self._give_back(*self._left.popleft())
        for number, (begin, end) in enumerate(self._free):
            if end - begin >= size_bytes:
                self._free[number : number + 1] = [(begin + size_bytes, end)] if end - begin > size_bytes else []
                return begin
        return None

    def _give_back(self, begin: int, end: int) -> None:
        insort(self._free, (begin, end))
        at = self._free.index((begin, end))
        near = self._free[max(at - 1, 0) : at + 2]
        joined = [near[0]]
        for one in near[1:]:
            if one[0] == joined[-1][1]:
                joined[-1] = joined[-1][0], one[1]
            else:
                joined.append(one)
        self._free[max(at - 1, 0) : at + 2] = joined


class Rooms:
    """Those of all ranks on the host, as one of them sees them.

    Args: own: this rank's. others: by rank. pids: of their processes.
    """

    def __init__(self, own: Room, others: Mapping[int, Attached], pids: Mapping[int, int]) -> None:
        self.own, self._others = own, others
        tables = {rank: memory.raw(0, 8 * TABLE_WORDS).cast("q") for rank, memory in others.items()}
        self._moved = Theirs(tables, pids)

    def view(self, rank: int, place: int, length: int, dtype: torch.dtype) -> Tensor:
        """The numbers of another rank, to read."""
        number, at_bytes = (place & ~NEW) >> MOVED_BITS, place & (1 << MOVED_BITS) - 1
        if not number:
            return self._others[rank].tensor(at_bytes, length, dtype)
        memory = self._moved.open(rank, number - 1)
        assert memory is not None  # it was opened when it was told
        return torch.frombuffer(memory, dtype=dtype, count=length, offset=at_bytes)

    def views(self, places: Sequence[int], like: Tensor) -> list[Tensor]:
        """Each rank's tensor of this length and dtype: `like` itself for this rank, which is not among the others."""
        length, dtype = like.numel(), like.dtype
        return [
            self.view(rank, place, length, dtype) if rank in self._others else like for rank, place in enumerate(places)
        ]

    def can_open(self, places: Sequence[int]) -> bool:
        """Whether what the other ranks have moved can be read here."""
        numbers = [(place & ~NEW) >> MOVED_BITS for place in places]
        return all(
            self._moved.open(rank, number - 1) is not None
            for rank, number in enumerate(numbers)
            if number and rank in self._others
        )

    def settle(self, place: int, all_can: bool) -> None:
        """All ranks can open what this one has moved, or do without."""
        if place & NEW:
            self.own.moved.told(((place & ~NEW) >> MOVED_BITS) - 1, all_can)


def make_room(ranks: int) -> Room | None:
    """A room for one of so many ranks on this machine; None where none can be had."""
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY or _promises_are_counted():
        return None  # it would take what others need
    size_bytes = os.sysconf("SC_PHYS_PAGES") // max(ranks, 1) * mmap.PAGESIZE
    try:
        memory = Memory(size_bytes)
        memory.keep_from_children()
    except (OSError, ValueError):
        return None
    return Room(memory, size_bytes)


def _promises_are_counted() -> bool:
    """Whether memory that is never written counts as if it were (vm.overcommit_memory)."""
    with suppress(OSError):
        return Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"
    return False
