"""Segments: memory that one process writes and other processes of the machine read.

      owner                                    another process
        segment  <── writes                      the same memory, in another mapping  ──> reads

Ranks, workers and servers use segments for gradients and values. Only the owner writes to a
segment, so a process that was stopped and wakes up long after the others gave it up can damage
nothing. A segment has no name, so none is left behind after a crash: another process opens it
through the owner's descriptor, which needs the same user on the same machine. A random token shows
that it is the right segment and not a later one with the same descriptor."""

from __future__ import annotations

import mmap
import os
import secrets
import stat
import sys
from collections.abc import Mapping
from errno import EPERM
from typing import Any

import numpy as np
import torch
from torch import Tensor

TOKEN_BYTES = 64
ALIGNMENT_BYTES = 64
NAME = "shoal"
LINK = f"/memfd:{NAME} (deleted)"  # where a descriptor of such memory leads to, by /proc
# Python has a name for this flag since 3.13.
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


class Segment:
    """Mapped memory that begins with a token. Positions count from the end of the token.

    Args: head: a mapping of the first page, in which a futex is the same for all processes.
    """

    def __init__(self, mapped: mmap.mmap, head: mmap.mmap) -> None:
        self._map = mapped
        self._head = head

    def tensor(self, at_bytes: int, length: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor in this memory.

        Raises: ValueError: it would not fit.
        """
        return torch.frombuffer(self._map, dtype=dtype, count=length, offset=TOKEN_BYTES + at_bytes)

    def raw(self, at_bytes: int, length_bytes: int) -> memoryview:
        """Return the same memory as bytes."""
        return memoryview(self._map)[TOKEN_BYTES + at_bytes : TOKEN_BYTES + at_bytes + length_bytes]

    def head_address(self, at_bytes: int) -> int:
        """Return the address of a byte of the first page in this process."""
        return np.frombuffer(self._head, np.uint8).ctypes.data + TOKEN_BYTES + at_bytes


class SharedSegment(Segment):
    """Memory of this process, zeros at first.

    Args: size_bytes: usable bytes; the token lies before them.

    Raises: OSError: there is not so much, or the system cannot share it.
    """

    def __init__(self, size_bytes: int) -> None:
        size_bytes = TOKEN_BYTES + max(size_bytes, 1)
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memory without a name to share (memfd_create)")
        self._descriptor = os.memfd_create(NAME)
        os.ftruncate(self._descriptor, size_bytes)
        mapped = mmap.mmap(self._descriptor, size_bytes)
        super().__init__(mapped, mapped)
        self._token = secrets.token_hex(TOKEN_BYTES // 2)
        self._map[:TOKEN_BYTES] = self._token.encode()
        self._map_bytes = size_bytes

    @property
    def description(self) -> dict[str, Any]:
        """The arguments of `attach` in another process, as JSON values."""
        return {
            "pid": os.getpid(),
            "fd": self._descriptor,
            "bytes": self._map_bytes,
            "token": self._token,
        }

    def release_pages(self, at_bytes: int, length_bytes: int) -> None:
        """Return full pages of a range to the system. They read as zeros from now on."""
        begin = -(-(TOKEN_BYTES + at_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (TOKEN_BYTES + at_bytes + length_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin and hasattr(mmap, "MADV_REMOVE"):
            self._map.madvise(mmap.MADV_REMOVE, begin, end - begin)

    def close(self) -> None:
        """Close the descriptor, so that no process can attach any more. The memory stays."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def attach(description: Mapping[str, Any]) -> Segment | None:
    """Attach another process's segment for reading; None if it cannot be opened.

    Args: description: its `SharedSegment.description`.
    """
    try:
        path = f"/proc/{int(description['pid'])}/fd/{int(description['fd'])}"
        size_bytes, token = int(description["bytes"]), str(description["token"])
        descriptor = _open_segment(path)
    except (OSError, KeyError, ValueError, TypeError):
        return None
    try:
        if os.fstat(descriptor).st_size != size_bytes:
            return None
        # torch wants writable memory. In a private mapping, a write by mistake is not seen by other
        # processes. The pages are never copied, so the system need not reserve memory for copies.
        flags = mmap.MAP_PRIVATE | NO_RESERVE
        mapped = mmap.mmap(descriptor, size_bytes, flags, mmap.PROT_READ | mmap.PROT_WRITE)
        # A futex in a private writable mapping would be another futex than the owner's, so this
        # page gets a shared mapping that is read-only.
        first_page = min(size_bytes, mmap.PAGESIZE)
        head = mmap.mmap(descriptor, first_page, mmap.MAP_SHARED, mmap.PROT_READ)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
    return Segment(mapped, head) if mapped[:TOKEN_BYTES] == token.encode() else None


def _open_segment(path: str) -> int:
    """Open the segment of another process of this user for reading, and return its descriptor.

    The path may come from a store that anybody can write: under another launcher than Shoal's,
    torch's TCPStore. So nothing is opened before it is known to be a segment: neither a device,
    where opening alone has effects, nor memory of another user, who could shrink it, which ends
    whoever reads it.

    Raises:
        OSError: it is no segment of this user.
    """
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        own_path = f"/proc/self/fd/{place}"
        status = os.fstat(place)
        is_segment = stat.S_ISREG(status.st_mode) and os.readlink(own_path) == LINK
        if not is_segment or status.st_uid != os.geteuid():
            raise PermissionError(EPERM, f"{path} is no segment of this user")
        return os.open(own_path, os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(place)
