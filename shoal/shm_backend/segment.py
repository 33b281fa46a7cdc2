"""Memory that other processes of this machine can read: numbers of a rank, gradients of a worker,
values of a server.

      a process                                another process
        its memory  <── writes                   the same memory, in a mapping of its own  ──> reads

Everybody writes to its own memory alone. A process that was stopped and wakes up long after it was
given up can thus
spoil nothing. The memory has no name that could be left behind: others open it through its owner's
descriptor, which takes the same user on the same machine, and a random token says whether it is the
one that was meant."""

from __future__ import annotations

import mmap
import os
import secrets
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

TOKEN_BYTES = 64
ALIGNMENT_BYTES = 64
NO_RESERVE = getattr(
    mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0
)  # Python names it since 3.13


class SharedSegment:
    """So many bytes, zeros at first. Raises nothing where it cannot be shared: `description` is
    empty then.
    """

    def __init__(self, size_bytes: int) -> None:
        self._descriptor = -1
        size_bytes = TOKEN_BYTES + max(size_bytes, 1)
        if hasattr(os, "memfd_create"):
            self._descriptor = os.memfd_create("shoal")
            os.ftruncate(self._descriptor, size_bytes)
        self._map = mmap.mmap(self._descriptor, size_bytes)
        self._token = secrets.token_hex(TOKEN_BYTES // 2)
        self._map[:TOKEN_BYTES] = self._token.encode()
        self._map_bytes = size_bytes

    @property
    def description(self) -> dict[str, Any]:
        """With which another process finds it."""
        if self._descriptor < 0:
            return {}
        return {
            "pid": os.getpid(),
            "fd": self._descriptor,
            "bytes": self._map_bytes,
            "token": self._token,
        }

    def tensor(self, at_bytes: int, length: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor in this memory."""
        return torch.frombuffer(self._map, dtype=dtype, count=length, offset=TOKEN_BYTES + at_bytes)

    def raw(self, at_bytes: int, length_bytes: int) -> memoryview:
        """The same memory as bytes."""
        return memoryview(self._map)[TOKEN_BYTES + at_bytes : TOKEN_BYTES + at_bytes + length_bytes]

    def head_address(self, at_bytes: int) -> int:
        """Where in this process's addresses a byte is."""
        return np.frombuffer(self._map, np.uint8).ctypes.data + TOKEN_BYTES + at_bytes

    def release_pages(self, at_bytes: int, length_bytes: int) -> None:
        """Give what lies there back to the machine, page by whole page; it reads as zeros from
        now on.
        """
        begin = -(-(TOKEN_BYTES + at_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (TOKEN_BYTES + at_bytes + length_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin and hasattr(mmap, "MADV_REMOVE"):
            self._map.madvise(mmap.MADV_REMOVE, begin, end - begin)

    def close(self) -> None:
        """Nobody can open it any more; tensors stay."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class AttachedSegment:
    """Another process's memory, to read.

    Attributes: head: its first page once more, at `head_address`. Sleeping on a number in it
        changes nothing there.
    """

    def __init__(self, mapped: mmap.mmap, head: mmap.mmap) -> None:
        self._map, self.head = mapped, head

    def head_address(self, at_bytes: int) -> int:
        """Where in this process's addresses a byte of the first page is."""
        return np.frombuffer(self.head, np.uint8).ctypes.data + TOKEN_BYTES + at_bytes

    def tensor(self, at_bytes: int, length: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor in it. Raises ValueError where it would lie outside."""
        return torch.frombuffer(self._map, dtype=dtype, count=length, offset=TOKEN_BYTES + at_bytes)

    def raw(self, at_bytes: int, length_bytes: int) -> memoryview:
        """The same memory as bytes."""
        return memoryview(self._map)[TOKEN_BYTES + at_bytes : TOKEN_BYTES + at_bytes + length_bytes]


def attach(description: Mapping[str, Any]) -> AttachedSegment | None:
    """The memory that another process has described; None where it cannot be reached."""
    try:
        path = f"/proc/{int(description['pid'])}/fd/{int(description['fd'])}"
        size_bytes, token = int(description["bytes"]), str(description["token"])
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, KeyError, ValueError, TypeError):
        return None
    try:
        if os.fstat(descriptor).st_size != size_bytes:
            return None
        # A private mapping: what is written here, by mistake, nobody else sees. torch wants memory
        # that it could write. It takes no room, and must not be counted as if it could.
        flags = mmap.MAP_PRIVATE | NO_RESERVE
        mapped = mmap.mmap(descriptor, size_bytes, flags, mmap.PROT_READ | mmap.PROT_WRITE)
        # The system's sleeping queues (futex) would make a private copy of a page that could be
        # written.
        first_page = min(size_bytes, mmap.PAGESIZE)
        head = mmap.mmap(descriptor, first_page, mmap.MAP_SHARED, mmap.PROT_READ)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
    return AttachedSegment(mapped, head) if mapped[:TOKEN_BYTES] == token.encode() else None
