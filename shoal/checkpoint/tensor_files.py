"""Write tensors to safetensors files and read them: each rank writes one file.

The header of each file has the offsets of its chunks under the key that torch's
HuggingFaceStorageReader looks for, so torch's own tools load and consolidate such a checkpoint.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal.checkpoint import manifest
from shoal.checkpoint.durable_io import durable_stream
from shoal.checkpoint.manifest import StoredFile
from shoal.checkpoint.rank_consensus import rank
from shoal.checkpoint.shard_format import header, stored_as
from shoal.checkpoint.tensor_index import (
    Chunk,
    TensorEntry,
    file_name,
    held_chunks,
    place_of_shard,
    stored,
)
from shoal.errors import CheckpointError

LayoutLookup = Callable[[str], Tensor | None]
MAPPED_BYTES = 16 << 20
"""Bytes that are read of a mapped file before it is mapped anew, so that little stays resident."""


def no_layout(_: str) -> None:
    """Return None for every name: every tensor is read in full."""


def write(
    directory: Path, tensors: Mapping[str, Tensor], share: Sequence[str]
) -> list[tuple[str, int, str]]:
    """Write this rank's chunks, fsync them, and read them back. Sends nothing.

    Args:
        directory: exists and is empty.
        tensors: of any shape, dtype, device and strides.
        share: names of those that this rank writes.

    Returns: name, size in bytes and digest of each file that was written, which is one at most.
    Raises:
        CheckpointError: what was read back is not what was written.
    """
    if not share:
        return []
    name = file_name(rank())
    held = held_chunks({key: tensors[key] for key in share})
    shapes = {key: (tensors[key].dtype, chunk["shape"]) for key, chunk in held.items()}
    head, order, _ = header(shapes, _sharding(held, shapes))
    with (
        durable_stream(directory / name) as (file, stream),
        torch.no_grad(),
        ThreadPoolExecutor(max_workers=1) as thread,
    ):
        stream.write(head)
        for key in order:
            stream.write(_bytes_of(tensors[key]))
        stream.flush()
        # The disk works while the file is read back from memory.
        synced = thread.submit(os.fsync, file.fileno())
        stored_file = StoredFile(file.size_bytes, file.digest.hexdigest())
        defect = manifest.defect(directory, name, stored_file)
        synced.result()
    if defect:
        raise CheckpointError(f"it was written, but reading it back failed; {defect}")
    return [(name, stored_file.size_bytes, stored_file.digest)]


def read(
    directory: Path, is_wanted: Callable[[str], bool], like: LayoutLookup = no_layout
) -> dict[str, Tensor]:
    """Read the tensors that `is_wanted` accepts by name, contiguous, on the CPU. Sends nothing.

    Args:
        like: name -> a tensor in the layout of this run, or None. If it is a DTensor, this rank
            reads its own shard only. Otherwise it reads the full tensor.

    Raises:
        CheckpointError: a file holds something else than the index says.
    """
    found: dict[str, Tensor] = {}
    targets: dict[str, tuple[Tensor, Sequence[int]]] = {}
    chunks = []
    for name, entry in stored(directory).items():
        if is_wanted(name):
            found[name], *targets[name] = _empty(entry, like(name))  # type: ignore[assignment]
            block, offsets = targets[name]
            chunks += [(name, one) for one in entry.chunks if _overlap(one, block, offsets)]
    for name, chunk, numbers in blocks(chunks):
        block, offsets = targets[name]
        overlap = _overlap(chunk, block, offsets)
        assert overlap is not None
        ours, theirs = overlap
        block[ours].copy_(numbers[theirs])
    return found


def blocks(chunks: Iterable[tuple[str, Chunk]]) -> Iterator[tuple[str, Chunk, Tensor]]:
    """Yield each chunk with its numbers in mapped memory, file by file. Do not write to them.

    Args: chunks: with the names of their tensors.

    Raises:
        CheckpointError: a file holds something else than the index says.
    """
    by_file: dict[Path, list[tuple[str, Chunk]]] = defaultdict(list)
    for name, chunk in chunks:
        by_file[chunk.file].append((name, chunk))
    for path in sorted(by_file):
        opened, read_bytes = _open(path), 0
        for name, chunk in by_file[path]:
            if read_bytes > MAPPED_BYTES:
                opened, read_bytes = _open(path), 0
            read_bytes += torch.Size(chunk.shape).numel() * chunk.dtype.itemsize
            yield name, chunk, _numbers(opened, name, chunk)


def _sharding(
    held: Mapping[str, Mapping[str, Any]], shapes: Mapping[str, tuple[torch.dtype, Sequence[int]]]
) -> dict[str, str]:
    """Return the texts in a header by which torch's reader finds the place of each chunk."""
    places = {}
    for name, (dtype, shape) in shapes.items():
        more = [0] * (len(stored_as(dtype, shape)[1]) - len(shape))
        places[name] = {"saved_offsets": [*held[name]["offsets"], *more]}
    return {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(places)}


def _bytes_of(tensor: Tensor) -> Any:
    """Return the numbers of this rank's chunk, row by row."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    numbers = local.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return numbers.reshape(-1).view(torch.uint8).numpy()


def _empty(entry: TensorEntry, like: Tensor | None) -> tuple[Tensor, Tensor, Sequence[int]]:
    """Return a tensor to be read, the part of it on this rank, and where that part begins."""
    if isinstance(like, DTensor) and like.shape == entry.shape:
        shard = torch.empty_like(like.detach(), dtype=entry.dtype)
        assert isinstance(shard, DTensor)
        return shard, shard.to_local(), place_of_shard(shard)[0]
    full = torch.empty(entry.shape, dtype=entry.dtype)
    return full, full, [0] * full.dim()


def _overlap(
    chunk: Chunk, block: Tensor, offsets: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return the elements that a chunk has of a block which begins at `offsets`.

    Returns: slices of the block and of the chunk; None if there are none.
    """
    ours, theirs = [], []
    for start, size, chunk_start, chunk_size in zip(
        offsets, block.shape, chunk.offsets, chunk.shape, strict=True
    ):
        first, end = max(start, chunk_start), min(start + size, chunk_start + chunk_size)
        if first >= end:
            return None
        ours.append(slice(first - start, end - start))
        theirs.append(slice(first - chunk_start, end - chunk_start))
    return tuple(ours), tuple(theirs)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _numbers(opened: Any, name: str, chunk: Chunk) -> Tensor:
    """Return the numbers of a chunk, mapped."""
    expected = stored_as(chunk.dtype, chunk.shape)
    try:
        place = opened.get_slice(name)
        found = place.get_dtype(), place.get_shape()
        block: Tensor = opened.get_tensor(name)
    except SafetensorError as error:
        raise CheckpointError(f"{chunk.file} cannot be read: {error}") from error
    if found != expected:
        raise CheckpointError(f"{name} in {chunk.file} is {found}; its index says {expected}")
    return block if block.dtype == chunk.dtype else block.view(chunk.dtype).squeeze(-1)
