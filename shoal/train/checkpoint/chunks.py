"""The chunks in which a checkpoint holds its tensors. Each is read alone, in its own memory.

    a tensor of 6 rows, saved by zero3 on 2 ranks      offsets  shape
      rows 0 1 2   chunk in __0_0.distcp               (0, 0)   (3, n)
      rows 3 4 5   chunk in __1_0.distcp               (3, 0)   (3, n)

DCP's own reader needs memory for the full tensor too, and keeps a chunk while it reads the next one
(torch 2.13).
"""

from __future__ import annotations

import io
import math
import mmap
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from shoal.errors import CheckpointError


@dataclass(frozen=True)
class Chunk:
    """A block of a tensor, of `shape` elements from index `offsets` on.

    It is a file of torch.save's in `size_bytes` of `file`, from byte `start_bytes` on.

    Attributes:
        data_start_bytes: where in `file` its numbers lie, row by row; None if the index does not
            tell, as in checkpoints of versions that called torch.save.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    start_bytes: int
    size_bytes: int
    data_start_bytes: int | None = None

    def read(self) -> Tensor:
        """Read the block to new memory on the CPU, with the strides that it was saved with.

        Raises:
            CheckpointError: the file holds something else there.
        """
        if self.data_start_bytes is None:
            return self._unzipped()
        block = torch.empty(self.shape, dtype=self.dtype)
        memory: Any = block.reshape(-1).view(torch.uint8).numpy()
        numbers = memoryview(memory)
        with self.file.open("rb", buffering=0) as file:
            file.seek(self.data_start_bytes)
            done = 0
            while done < len(numbers) and (count := file.readinto(numbers[done:])):
                done += count
        if done < len(numbers):
            raise CheckpointError(f"{self._source()} cannot be read: the file ends before it does")
        return block

    def mapped(self) -> Tensor:
        """Return the block in memory that the kernel fills when it is read. Do not write to it.

        Raises:
            CheckpointError: the file holds something else there.
        """
        if self.data_start_bytes is None:
            return self._unzipped()
        size_bytes = math.prod(self.shape) * self.dtype.itemsize
        first = self.data_start_bytes - self.data_start_bytes % mmap.ALLOCATIONGRANULARITY
        skipped = self.data_start_bytes - first
        with self.file.open("rb", buffering=0) as file:
            try:
                memory = mmap.mmap(
                    file.fileno(), skipped + size_bytes, mmap.MAP_PRIVATE, offset=first
                )
            except ValueError as error:
                raise CheckpointError(f"{self._source()} cannot be read: {error}") from error
        return self._shaped(memoryview(memory)[skipped:])

    def _shaped(self, numbers: memoryview) -> Tensor:
        return torch.frombuffer(numbers, dtype=self.dtype).reshape(self.shape)

    def _unzipped(self) -> Tensor:
        """Read the block by torch.load."""
        with self.file.open("rb") as stream:
            try:
                window = cast(IO[bytes], _FileSlice(stream, self.start_bytes, self.size_bytes))
                block: Tensor = torch.load(window, map_location="cpu", weights_only=True)
            except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
                raise CheckpointError(f"{self._source()} cannot be read: {error}") from error
        if (tuple(block.shape), block.dtype) != (self.shape, self.dtype):
            raise CheckpointError(
                f"{self._source()} is {block.dtype} {tuple(block.shape)}; its index says otherwise"
            )
        return block

    def runs(self, full_shape: torch.Size) -> Iterator[tuple[int, int]]:
        """Yield (start, length) of each run of the block in the full tensor.

        Both are in elements, in the order of the block. A block that is cut only in dimension 0 is
        one run.
        """
        cut_dims = [dim for dim, size in enumerate(full_shape) if self.shape[dim] != size]
        last_cut = max(cut_dims, default=0)
        strides = [math.prod(full_shape[dim + 1 :]) for dim in range(len(full_shape))]
        first = sum(index * stride for index, stride in zip(self.offsets, strides, strict=True))
        length = math.prod(self.shape[last_cut:])
        # From the last dimension that is cut on, elements follow each other in both tensors.
        for outer in product(*(range(size) for size in self.shape[:last_cut])):
            yield first + sum(index * strides[dim] for dim, index in enumerate(outer)), length

    def _source(self) -> str:
        return f"{self.file} from byte {self.start_bytes} on"


@dataclass(frozen=True)
class TensorEntry:
    """A full tensor in a checkpoint, and the chunks that fill it without overlap."""

    shape: torch.Size
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


class _FileSlice(io.RawIOBase):
    """A range of bytes of a buffered stream, as a file that begins at 0.

    It has `readinto`, so that torch.load reads a tensor straight into its memory.
    """

    def __init__(self, stream: IO[bytes], start_bytes: int, size_bytes: int) -> None:
        super().__init__()
        self.stream: Any = stream
        self.start_bytes = start_bytes
        self.size_bytes = size_bytes
        self.position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        origins = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.size_bytes}
        self.position = origins[whence] + offset
        return self.position

    def readinto(self, buffer: Any, /) -> int:
        self.stream.seek(self.start_bytes + self.position)
        remaining = max(self.size_bytes - self.position, 0)
        count: int = self.stream.readinto(memoryview(buffer)[:remaining])
        self.position += count
        return count
