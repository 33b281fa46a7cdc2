"""A digest of large files that costs less than to read them: 128 bits, several GiB/s on one core.

      256 KiB of a file as words of 64 bits     w0 w1 w2 ...
      low half     sum of  w_i  a_i           mod 2^64       a_i, b_i: fixed odd factors, so each
      high half    sum of (w_i >> 31) b_i     mod 2^64       word has its own place
      file         halves of all blocks, one after the other, then the length

SHA-256 took most of the time of a save. This is a multilinear hash: it finds any single change, and
misses an accident of several with a probability of about 2^-64. It is no cryptographic hash, and
nobody can do without it what a plain SHA-256 would prevent: who writes the files of a checkpoint
can write its manifest too. Files that are parsed keep their SHA-256.
"""

from __future__ import annotations

import io
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

BLOCK_BYTES = 1 << 18
CHAIN = (6364136223846793005, 3202034522624059733)
"""Odd multipliers that chain blocks, one for each half."""
SEEDS = (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03)


class BlockDigest:
    """The digest of bytes that come in pieces, whose limits do not count."""

    def __init__(self) -> None:
        self._buffer = torch.zeros(BLOCK_BYTES // 8, dtype=torch.int64)
        self._bytes = self._buffer.numpy().view(np.uint8)
        self._shifted = torch.empty_like(self._buffer)
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
            if self._filled == 0 and _is_whole(block):
                self._absorb(torch.from_numpy(block.view(np.int64)))
                position += BLOCK_BYTES
                continue
            count = min(BLOCK_BYTES - self._filled, len(source) - position)
            end = self._filled + count
            self._bytes[self._filled : end] = source[position : position + count]
            position += count
            self._filled = end
            if end == BLOCK_BYTES:
                self._absorb(self._buffer)

    def read(self, file: io.RawIOBase) -> None:
        """Add all that is left of an unbuffered file, without a copy."""
        buffer: Any = self._bytes
        while count := file.readinto(buffer[self._filled :]):
            self._length += count
            self._filled += count
            if self._filled == BLOCK_BYTES:
                self._absorb(self._buffer)

    def hexdigest(self) -> str:
        """Return the digest of all bytes, 32 hexadecimal digits. No `update` may follow."""
        if self._filled:
            self._bytes[self._filled :] = 0
            self._absorb(self._buffer)
        low, high = (
            (half * multiplier + self._length) % (1 << 64)
            for half, multiplier in zip(self._halves, CHAIN, strict=True)
        )
        return f"{high:016x}{low:016x}"

    def _absorb(self, block: Tensor) -> None:
        """Add a block, (BLOCK_BYTES / 8,) of int64. The calls of torch let other threads run."""
        factors_low, factors_high = _factors()
        low = int(torch.dot(block, factors_low))
        torch.bitwise_right_shift(block, 31, out=self._shifted)
        sums = (low, int(torch.dot(self._shifted, factors_high)))
        self._halves = [
            (half * multiplier + value) % (1 << 64)
            for half, multiplier, value in zip(self._halves, CHAIN, sums, strict=True)
        ]
        self._filled = 0


def _is_whole(block: np.ndarray[Any, Any]) -> bool:
    """Return True for a block whose words can be read where they lie. Torch takes no constants."""
    aligned = block.ctypes.data % 8 == 0
    return len(block) == BLOCK_BYTES and aligned and block.flags.writeable


@lru_cache(maxsize=1)
def _factors() -> tuple[Tensor, Tensor]:
    """Return the odd factors of both halves, (BLOCK_BYTES / 8,), by SplitMix64 (Steele, 2014)."""
    low, high = (_splitmix(seed, BLOCK_BYTES // 8) for seed in SEEDS)
    return low, high


def _splitmix(seed: int, count: int) -> Tensor:
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(z.view(np.int64))
