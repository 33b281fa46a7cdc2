"""The pieces in which a checkpoint holds its tensors, each read alone, in the memory of that piece.

    a tensor of 6 rows, saved by zero3 on 2 ranks      place    shape
      rows 0 1 2   piece in __0_0.distcp               (0, 0)   (3, n)
      rows 3 4 5   piece in __1_0.distcp               (3, 0)   (3, n)

DCP's own reader needs the whole tensor besides, and holds the piece before while it reads the next
(torch 2.13)."""

from __future__ import annotations

import io
import math
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from shoal.errors import CheckpointError


@dataclass(frozen=True)
class Chunk:
    """A block of a tensor: `shape` elements from index `place` on. It lies in `file`, saved by
    torch.save.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    start_bytes: int
    size_bytes: int

    def read(self) -> Tensor:
        """The block, on the CPU, of the strides that it was saved with. Nothing else is held in
        memory.

        Raises: CheckpointError: the file holds something else there.
        """
        with self.file.open("rb") as stream:
            try:
                window = cast(IO[bytes], _FileSlice(stream, self.start_bytes, self.size_bytes))
                block: Tensor = torch.load(window, map_location="cpu", weights_only=True)
            except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
                raise CheckpointError(f"{self._where()} cannot be read: {error}") from error
        if (tuple(block.shape), block.dtype) != (self.shape, self.dtype):
            raise CheckpointError(
                f"{self._where()} is {block.dtype} {tuple(block.shape)}; its index says otherwise"
            )
        return block

    def runs(self, whole: torch.Size) -> Iterator[tuple[int, int]]:
        """Where the block lies in a contiguous tensor of shape `whole`: (start, length) of every
        unbroken run, in elements and in the block's own order. One run where only dimension 0 is
        cut."""
        cut = max((dim for dim, size in enumerate(whole) if self.shape[dim] != size), default=0)
        strides = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]
        first = sum(index * stride for index, stride in zip(self.offsets, strides, strict=True))
        for outer in product(*(range(size) for size in self.shape[:cut])):
            yield (
                first + sum(index * strides[dim] for dim, index in enumerate(outer)),
                math.prod(self.shape[cut:]),
            )

    def _where(self) -> str:
        return f"{self.file} from byte {self.start_bytes} on"


@dataclass(frozen=True)
class TensorEntry:
    """A tensor as a checkpoint holds it: shape and dtype of the whole, and pieces that fill it
    without overlap.
    """

    shape: torch.Size
    dtype: torch.dtype
    pieces: tuple[Chunk, ...]


def stored(directory: Path) -> dict[str, TensorEntry]:
    """Every tensor in a checkpoint, by name. Reads its index alone, a pickle: verify the checkpoint
    first.

    Raises: CheckpointError: the pieces of a tensor do not fill it.
    """
    metadata = FileSystemReader(directory).read_metadata()
    return {
        name: _stored(directory, name, entry, metadata.storage_data)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _stored(directory: Path, name: str, entry: TensorStorageMetadata, index: Any) -> TensorEntry:
    dtype = entry.properties.dtype
    pieces = []
    for chunk in entry.chunks:
        if chunk.sizes.numel() > 0:
            at = index[MetadataIndex(name, chunk.offsets)]
            file = directory / at.relative_path
            pieces.append(
                Chunk(tuple(chunk.offsets), tuple(chunk.sizes), dtype, file, at.offset, at.length)
            )
    found = sum(math.prod(piece.shape) for piece in pieces)
    if found != entry.size.numel():
        raise CheckpointError(
            f"{directory} has {found} numbers of {name}, and not {entry.size.numel()}"
        )
    return TensorEntry(entry.size, dtype, tuple(pieces))


class _FileSlice(io.RawIOBase):
    """`size_bytes` of a buffered stream as a file of its own. It has `readinto`, so that torch.load
    reads a tensor straight into its place."""

    def __init__(self, stream: IO[bytes], start_bytes: int, size_bytes: int) -> None:
        super().__init__()
        self.stream: Any = stream
        self.start_bytes, self.size_bytes, self.position = start_bytes, size_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self.position = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.size_bytes}[
            whence
        ] + offset
        return self.position

    def readinto(self, buffer: Any, /) -> int:
        self.stream.seek(self.start_bytes + self.position)
        count: int = self.stream.readinto(
            memoryview(buffer)[: max(self.size_bytes - self.position, 0)]
        )
        self.position += count
        return count
