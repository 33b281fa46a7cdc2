"""Memory that another process of this machine can read: gradients of a worker, values of a server.

      worker                                   server
        gradients ── (a frame: "part 3 is there") ──> adds them up from where they lie
        values   <── (a frame: "part 3 is there") ── where they lie; copied by whoever wants them

Everybody writes to its own memory alone. A server that was stopped and wakes up long after it was replaced can thus
spoil nothing. The memory has no name that could be left behind: others open it through its owner's descriptor, which
takes the same user on the same machine, and a random token says whether it is the one that was meant.
"""

from __future__ import annotations

import mmap
import os
import secrets
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.server.layout import Part

TOKEN_BYTES = 64
ALIGNMENT_BYTES = 64
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)  # Python names it since 3.13


class Memory:
    """So many bytes, zeros at first. Raises nothing where it cannot be shared: `description` is empty then."""

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
        return {"pid": os.getpid(), "fd": self._descriptor, "bytes": self._map_bytes, "token": self._token}

    def tensor(self, at_bytes: int, length: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor in this memory."""
        return torch.frombuffer(self._map, dtype=dtype, count=length, offset=TOKEN_BYTES + at_bytes)

    def discard(self, at_bytes: int, length_bytes: int) -> None:
        """Give what lies there back to the machine, page by whole page; it reads as zeros from now on."""
        begin = -(-(TOKEN_BYTES + at_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (TOKEN_BYTES + at_bytes + length_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin and hasattr(mmap, "MADV_REMOVE"):
            self._map.madvise(mmap.MADV_REMOVE, begin, end - begin)

    def close(self) -> None:
        """Nobody can open it any more; tensors stay."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Attached:
    """Another process's memory, to read."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self._map = mapped

    def tensor(self, at_bytes: int, length: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor in it. Raises ValueError where it would lie outside."""
        return torch.frombuffer(self._map, dtype=dtype, count=length, offset=TOKEN_BYTES + at_bytes)


def attach(description: Mapping[str, Any]) -> Attached | None:
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
        # A private mapping: what is written here, by mistake, nobody else sees. torch wants memory that it could write.
        # It takes no room, and must not be counted as if it could.
        flags = mmap.MAP_PRIVATE | NO_RESERVE
        mapped = mmap.mmap(descriptor, size_bytes, flags, mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
    return Attached(mapped) if mapped[:TOKEN_BYTES] == token.encode() else None


def offsets(parts: Iterable[Part]) -> tuple[dict[int, int], int]:
    """Where in a server's memory each of its parts lies, in bytes, and how long they are together."""
    at, found = 0, {}
    for part in parts:
        found[part.number] = at
        at += -(-part.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return found, at
