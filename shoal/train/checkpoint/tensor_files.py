"""Write tensors to files and read them, through torch.distributed.checkpoint (DCP).

Every entry is a tensor, so DCP pickles nothing of ours. Its index is a pickle, which DCP would load
whatever it names. So an index of our own is written beside it, and DCP is given that: see
`tensor_index`.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as load_into
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from shoal.errors import CheckpointError
from shoal.train.checkpoint import tensor_index
from shoal.train.checkpoint.block_digest import BlockDigest
from shoal.train.checkpoint.chunks import TensorEntry
from shoal.train.checkpoint.durable_io import durable_stream
from shoal.train.checkpoint.manifest import StoredFile
from shoal.train.checkpoint.rank_consensus import rank

LayoutLookup = Callable[[str], Tensor | None]


def no_layout(_: str) -> None:
    """Return None for every name: every tensor is read in full."""


class HashingFiles(FileSystem):
    """A file system for DCP to write to. It hashes each file, and fsyncs it when it is closed.

    DCP itself fsyncs `.metadata` before it flushes the stream's buffer. So the end of the file may
    not be on the disk when the rename is (torch 2.13).
    """

    def __init__(self) -> None:
        self.written: dict[str, StoredFile] = {}

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        assert mode == "wb", mode
        # What is parsed has a SHA-256; tensors, which are nearly all bytes, a faster digest.
        is_large = Path(path).suffix == ".distcp"
        with durable_stream(Path(path), BlockDigest() if is_large else None) as (file, stream):
            yield stream
        digest = file.digest.hexdigest()
        self.written[Path(path).name] = (
            StoredFile(file.size_bytes, blocks=digest)
            if is_large
            else StoredFile(file.size_bytes, digest)
        )

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        os.rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class IndexingWriter(FileSystemWriter):
    """DCP's writer, which writes an index of our own too, on the rank that writes DCP's."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        directory = Path(self.path)
        text = tensor_index.to_text(tensor_index.from_torch(metadata, directory))
        with self.fs.create_stream(directory / tensor_index.FILE_NAME, "wb") as stream:
            stream.write(text.encode())


class IndexedReader(FileSystemReader):
    """DCP's reader of tensors, with an index that is already read.

    Args:
        entries: the tensors that may be read.
    """

    def __init__(self, directory: Path, entries: Mapping[str, TensorEntry]) -> None:
        super().__init__(directory)
        self._index = tensor_index.to_torch(entries)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the index. `.metadata` is not opened."""
        return self._index


def write(
    directory: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None
) -> dict[str, StoredFile]:
    """Write this rank's share of `tensors`. Collective.

    Args:
        directory: exists and is empty.
        tensors: of any shape, dtype, device and strides. A plain tensor that several ranks have
            under one name is written by one of them.
        group: of all ranks; None for the default group.

    Returns: the files that this rank has written, by name.
    Raises:
        CheckpointError: on the ranks that failed only. The others return as usual, so ask for a
            consensus afterwards.
    """
    files = HashingFiles()
    writer = IndexingWriter(directory, sync_files=False, overwrite=False)
    writer.fs = files
    with _dcp_errors(rank()), torch.no_grad():
        planner = DefaultSavePlanner(flatten_state_dict=False)
        save(dict(tensors), storage_writer=writer, planner=planner, process_group=group)
    return files.written


def read(
    directory: Path, is_wanted: Callable[[str], bool], like: LayoutLookup = no_layout
) -> dict[str, Tensor]:
    """Read the tensors that `is_wanted` accepts by name, contiguous, on the CPU. Sends nothing.

    Args:
        like: name -> a tensor in the layout of this run, or None. If it is a DTensor, this rank
            reads its own shard only. Otherwise it reads the full tensor.

    Raises:
        CheckpointError: an entry is no tensor, or DCP cannot read its files.
    """
    entries = {
        name: entry for name, entry in tensor_index.stored(directory).items() if is_wanted(name)
    }
    layouts = {name: like(name) for name in entries}
    # A tensor in one chunk is read as it is: DCP would read it, and copy it to the result.
    whole = {
        name: entry.chunks[0].read().contiguous()
        for name, entry in entries.items()
        if not isinstance(layouts[name], DTensor) and _is_one_chunk(entry)
    }
    others = {name: entry for name, entry in entries.items() if name not in whole}
    tensors = {name: _allocated(entry, layouts[name]) for name, entry in others.items()}
    if others:
        reader = IndexedReader(directory, others)
        with _dcp_errors(0):  # with no_dist, DCP calls every rank 0
            planner = DefaultLoadPlanner(flatten_state_dict=False)
            load_into(
                cast(dict[str, Any], tensors), storage_reader=reader, planner=planner, no_dist=True
            )
    return {name: whole[name] if name in whole else tensors[name] for name in entries}


def _is_one_chunk(entry: TensorEntry) -> bool:
    return len(entry.chunks) == 1 and entry.chunks[0].shape == tuple(entry.shape)


def _allocated(entry: TensorEntry, like: Tensor | None) -> Tensor:
    if isinstance(like, DTensor) and like.shape == entry.shape:
        return torch.empty_like(like.detach(), dtype=entry.dtype)
    return torch.empty(entry.shape, dtype=entry.dtype)


@contextmanager
def _dcp_errors(dcp_rank: int) -> Generator[None, None, None]:
    """Turn this rank's failure in DCP into a CheckpointError. Ignore failures of other ranks.

    Other ranks raise their own failures. Ctrl-C stays a KeyboardInterrupt.

    Args:
        dcp_rank: the number that DCP gives to this rank.
    """
    # Set once and kept: `catch_warnings` in a thread would restore the filters of all threads, and
    # lose changes that others have made meanwhile.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
    try:
        yield
    except CheckpointException as error:
        cause = error.failures[dcp_rank][0] if dcp_rank in error.failures else None
        if isinstance(cause, Exception):
            raise CheckpointError(f"{type(cause).__name__}: {cause}") from error
        if cause is not None:
            raise cause from None
