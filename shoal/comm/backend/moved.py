"""Gradient buckets of DistributedDataParallel, moved to where other ranks can read them when they are first reduced.

      first step     bucket ── all_reduce: moved, told to the others, who open it
      from then on   bucket, in shared memory, written by DDP and read by all: no copy

DDP asks its backend for buckets in C++, which does not hear Python. But a bucket comes here when it is reduced, and
torch can give a tensor's storage other memory (what `share_memory_()` does), with all views of it. Nobody but DDP may
hold such a tensor's address, so only what DDP itself reduces is moved: a call from inside the backward pass that no
line of Python makes. DDP_DISABLE_COMM_MEM=1, torch's own switch for buckets in special memory, forbids it.

That memory is in /dev/shm, without a name there, and goes with its process; at least half of it, and 1 GiB, is left to
others. As with a room, a process that is forked from a rank does not have it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from shoal.comm.memory import NO_RESERVE
from shoal.torch_private.tensor_state import shared_memory_of

SHARED = "/dev/shm"
LEFT_BYTES = 1 << 30
DRIVER = "_engine_run_backward"
"""The function of torch.autograd.graph in which C++ computes gradients."""
MOST = 64
WORDS = 4  # of each in the table: inode, descriptor, bytes, -
TABLE_WORDS = MOST * WORDS
MADV_DONTFORK = 10


class Moved:
    """This rank's.

    Args: table: TABLE_WORDS numbers that the other ranks can read.
    """

    def __init__(self, table: memoryview) -> None:
        self._table = table
        self._held: dict[int, tuple[Any, int, int]] = {}  # by number: the storage, from, to
        self.opened: set[int] = set()  # all ranks have it
        self._refused: set[int] = set()  # some rank cannot open it
        self._failed = False  # it will again
        self._lock = threading.Lock()  # calls are begun by one thread and may be finished by another

    def move(self, tensor: Tensor) -> None:
        """If it can be moved, and has not been."""
        storage = tensor.untyped_storage()
        if (
            self._failed
            or storage.is_shared()
            or storage.nbytes() != tensor.nbytes
            or not _leaves_enough(tensor.nbytes)
        ):
            return
        with self._lock:
            self._let_go()
            self._move(tensor, storage)

    def _move(self, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        number = next((number for number in range(MOST) if number not in self._held), None)
        if number is None:
            return
        try:
            descriptor, size_bytes = shared_memory_of(storage)
            inode = os.fstat(descriptor).st_ino
        except (OSError, RuntimeError):
            self._failed = True
            return
        begin = tensor.data_ptr()
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size_bytes), MADV_DONTFORK)
        for at, fact in enumerate((inode, descriptor, size_bytes)):
            self._table[WORDS * number + at] = fact
        self._held[number] = StorageWeakRef(storage), begin, begin + size_bytes

    def find(self, tensor: Tensor) -> tuple[int, int] | None:
        """In which of them, and how many bytes from its beginning, a tensor lies."""
        address = tensor.data_ptr()
        with self._lock:
            self._let_go()
            for number, (_, begin, end) in self._held.items():
                if begin <= address and address + tensor.nbytes <= end and number not in self._refused:
                    return number, address - begin
        return None

    def told(self, number: int, all_have: bool) -> None:
        """Whether all other ranks could open it."""
        (self.opened if all_have else self._refused).add(number)

    def _let_go(self) -> None:
        for number in [number for number, (storage, _, _) in self._held.items() if storage.expired()]:
            del self._held[number]
            self._table[WORDS * number] = 0
            self.opened.discard(number)
            self._refused.discard(number)


class Theirs:
    """What the other ranks have moved, as one of them sees it.

    Args: tables: by rank. pids: of their processes.
    """

    def __init__(self, tables: Mapping[int, memoryview], pids: Mapping[int, int]) -> None:
        self._tables, self._pids = tables, pids
        self._maps: dict[tuple[int, int], tuple[int, mmap.mmap]] = {}  # by rank and number: inode, memory

    def open(self, rank: int, number: int) -> mmap.mmap | None:
        """To read; None where it cannot be reached. What ranks have let go of is let go of here."""
        for key in [key for key, (inode, _) in self._maps.items() if self._row(*key)[0] != inode]:
            del self._maps[key]
        if (rank, number) not in self._maps:
            inode, descriptor, size_bytes = self._row(rank, number)
            mapped = _open(self._pids[rank], inode, descriptor, size_bytes)
            if mapped is None:
                return None
            self._maps[rank, number] = inode, mapped
        return self._maps[rank, number][1]

    def _row(self, rank: int, number: int) -> Sequence[int]:
        return self._tables[rank][WORDS * number : WORDS * number + 3].tolist()


def reduced_by_ddp() -> bool:
    """Whether the function that asks was called by C++ in a backward pass. Only for a call's own first function."""
    if os.environ.get("DDP_DISABLE_COMM_MEM") == "1":
        return False
    try:
        return sys._getframe(2).f_code.co_name == DRIVER
    except ValueError:  # there is no Python at all in this thread
        return False


def _leaves_enough(size_bytes: int) -> bool:
    try:
        there = os.statvfs(SHARED)
    except OSError:
        return False
    left_bytes = there.f_bavail * there.f_frsize - size_bytes
    return left_bytes >= max(there.f_blocks * there.f_frsize // 2, LEFT_BYTES)


def _open(pid: int, inode: int, descriptor: int, size_bytes: int) -> mmap.mmap | None:
    try:
        opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        facts = os.fstat(opened)
        if facts.st_ino != inode or facts.st_size < size_bytes:
            return None
        # Private, as `memory.attach` says: torch wants memory that it could write.
        flags = mmap.MAP_PRIVATE | NO_RESERVE
        return mmap.mmap(opened, size_bytes, flags, mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError):
        return None
    finally:
        os.close(opened)
