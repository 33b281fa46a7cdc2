"""Tensors to files and back, through torch.distributed.checkpoint (DCP).

Every entry is a tensor, so DCP pickles nothing of ours. Its index, `.metadata`, is a pickle all the
same: `read` is called only after the manifest was verified."""

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
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_into
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from shoal.errors import CheckpointError
from shoal.train.checkpoint.durable_io import durable_stream
from shoal.train.checkpoint.manifest import StoredFile
from shoal.train.checkpoint.rank_consensus import rank

LayoutLookup = Callable[[str], Tensor | None]


def no_layout(_: str) -> None:
    """Every tensor is read whole."""


class HashingFiles(FileSystem):
    """DCP's view of the file system, for writing: hashes what passes, and fsyncs each file when it
    is closed.

    DCP's own fsync of `.metadata` comes before the stream's buffer is flushed, so that the end of
    the file may not be on the disk when the rename is (torch 2.13)."""

    def __init__(self) -> None:
        self.written: dict[str, StoredFile] = {}

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        assert mode == "wb", mode
        with durable_stream(Path(path)) as (file, stream):
            yield stream
        self.written[Path(path).name] = StoredFile(file.size_bytes, file.sha256.hexdigest())

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        os.rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


def write(
    directory: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None
) -> dict[str, StoredFile]:
    """Write this rank's share of `tensors`; what this rank wrote, by file name. All ranks must call
    it.

    Args: directory: exists and is empty. tensors: of any shape, dtype, device and strides. A plain
        tensor that several ranks have under one name is
            written by one of them.
        group: of all ranks; None for the default group.

    Raises: CheckpointError: on those ranks that failed; the others return as if nothing were wrong,
        so take a vote.
    """
    files = HashingFiles()
    writer = FileSystemWriter(directory, sync_files=False, overwrite=False)
    writer.fs = files
    with _dcp_errors(rank()), torch.no_grad():
        planner = DefaultSavePlanner(flatten_state_dict=False)
        save(dict(tensors), storage_writer=writer, planner=planner, process_group=group)
    return files.written


def read(
    directory: Path, wanted: Callable[[str], bool], like: LayoutLookup = no_layout
) -> dict[str, Tensor]:
    """The tensors whose names are `wanted`, whole, contiguous, on the CPU. Nothing is sent between
    ranks.

    Args: like: name -> a tensor of today's layout, or None. Where it is a DTensor, this rank reads
        its shard alone.

    Raises:
        CheckpointError: an entry is no tensor, or DCP cannot read its files.
    """
    reader = FileSystemReader(directory)
    stored = {
        name: entry
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if wanted(name)
    }
    strange = sorted(
        name for name, entry in stored.items() if not isinstance(entry, TensorStorageMetadata)
    )
    if strange:
        raise CheckpointError(f"{directory} has entries that are no tensors: {', '.join(strange)}")
    tensors = {
        name: _allocated(cast(TensorStorageMetadata, entry), like(name))
        for name, entry in stored.items()
    }
    with _dcp_errors(0):  # with no_dist, DCP calls every rank 0
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        load_into(
            cast(dict[str, Any], tensors), storage_reader=reader, planner=planner, no_dist=True
        )
    return tensors


def _allocated(entry: TensorStorageMetadata, like: Tensor | None) -> Tensor:
    if isinstance(like, DTensor) and like.shape == entry.size:
        return torch.empty_like(like.detach(), dtype=entry.properties.dtype)
    return torch.empty(entry.size, dtype=entry.properties.dtype)


@contextmanager
def _dcp_errors(number: int) -> Generator[None, None, None]:
    """DCP's failures: this rank's own as a CheckpointError, those of others not at all; Ctrl-C
    stays what it is.

    Args:
        number: this rank in DCP's eyes.
    """
    # For good: what catch_warnings takes back in a thread is the filters of all, with what others
    # have changed since.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
    try:
        yield
    except CheckpointException as error:
        mine = error.failures[number][0] if number in error.failures else None
        if isinstance(mine, Exception):
            raise CheckpointError(f"{type(mine).__name__}: {mine}") from error
        if mine is not None:
            raise mine from None
