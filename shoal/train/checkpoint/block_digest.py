"""A digest of large files that costs less than to read them: 128 bits, several GiB/s on one core.

      256 KiB of a file as words of 64 bits     w0 w1 w2 ...
      low half     sum of  w_i  a_i           mod 2^64       a_i, b_i: fixed odd factors, so each
      high half    sum of (w_i >> 31) b_i     mod 2^64       word has its own place
      file         halves of all blocks, one after the other, then the length

With a compiler both sums take one pass, in block_sums.c; else torch computes them in three.

SHA-256 took most of the time of a save. This is a multilinear hash: it finds any single change, and
misses an accident of several with a probability of about 2^-64. It is no cryptographic hash, and
nobody can do without it what a plain SHA-256 would prevent: who writes the files of a checkpoint
can write its manifest too. Files that are parsed keep their SHA-256.
"""

from __future__ import annotations

import io
import os
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from shoal.platform import _block_sums as compiled
else:
    try:
        from shoal.platform import _block_sums as compiled
    except ImportError:  # there was no compiler when Shoal was installed
        compiled = None

VERSION = 1
"""Version of the compiled module's arguments: raise it here and in block_sums.c."""
_is_compiled = (
    compiled is not None and compiled.VERSION == VERSION and os.environ.get("SHOAL_COMPILED") != "0"
)
Array = np.ndarray[Any, np.dtype[Any]]

BLOCK_BYTES = 1 << 18
CHAIN = (6364136223846793005, 3202034522624059733)
"""Odd multipliers that chain blocks, one for each half."""
SEEDS = (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03)


class BlockDigest:
    """The digest of bytes that come in pieces, whose limits do not count."""

    def __init__(self) -> None:
        self._buffer = np.zeros(BLOCK_BYTES, np.uint8)
        self._filled = 0
        self._length = 0
        self._halves = [1, 1]

    def update(self, data: Any) -> None:
        """Add bytes: any object with a contiguous buffer."""
        source = np.frombuffer(data, dtype=np.uint8)
        self._length += len(source)
        position = 0
        while position < len(source):
            block = source[position : position + BLOCK_BYTES]
            if self._filled == 0 and len(block) == BLOCK_BYTES:
                self._absorb(block)
                position += BLOCK_BYTES
                continue
            count = min(BLOCK_BYTES - self._filled, len(source) - position)
            end = self._filled + count
            self._buffer[self._filled : end] = source[position : position + count]
            position += count
            self._filled = end
            if end == BLOCK_BYTES:
                self._absorb(self._buffer)

    def read(self, file: io.RawIOBase) -> None:
        """Add all that is left of an unbuffered file, without a copy."""
        buffer: Any = self._buffer
        while count := file.readinto(buffer[self._filled :]):
            self._length += count
            self._filled += count
            if self._filled == BLOCK_BYTES:
                self._absorb(self._buffer)

    def hexdigest(self) -> str:
        """Return the digest of all bytes, 32 hexadecimal digits. No `update` may follow."""
        if self._filled:
            self._buffer[self._filled :] = 0
            self._absorb(self._buffer)
        low, high = (
            (half * multiplier + self._length) % (1 << 64)
            for half, multiplier in zip(self._halves, CHAIN, strict=True)
        )
        return f"{high:016x}{low:016x}"

    def _absorb(self, block: Array) -> None:
        """Add a block, (BLOCK_BYTES,) of uint8. Other threads may run meanwhile."""
        sums = compiled.block_sums(block, *factors()) if _is_compiled else sums_by_torch(block)
        self._halves = [
            (half * multiplier + value) % (1 << 64)
            for half, multiplier, value in zip(self._halves, CHAIN, sums, strict=True)
        ]
        self._filled = 0


def sums_by_torch(block: Array) -> tuple[int, int]:
    """Return both sums of a block."""
    # A copy where words cannot be read as they lie: torch takes no constants.
    whole = block if block.ctypes.data % 8 == 0 and block.flags.writeable else block.copy()
    words = torch.from_numpy(whole.view(np.int64))
    low, high = (torch.from_numpy(each.view(np.int64)) for each in factors())
    shifted = torch.bitwise_right_shift(words, 31)
    return int(torch.dot(words, low)), int(torch.dot(shifted, high))


@lru_cache(maxsize=1)
def factors() -> tuple[Array, Array]:
    """Return the odd factors of both halves, (BLOCK_BYTES / 8,), by SplitMix64 (Steele, 2014)."""
    low, high = (_splitmix(seed, BLOCK_BYTES // 8) for seed in SEEDS)
    return low, high


def _splitmix(seed: int, count: int) -> Array:
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)
