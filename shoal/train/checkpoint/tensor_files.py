"""Write tensors to files and read them: each rank writes one file, in parts that torch.load reads.

    rank 0   held_chunks ─┐ every rank knows   ┌ write ── __0_0.distcp ─┐ every rank knows
    rank 1   held_chunks ─┘ who holds what     └ write ── __1_0.distcp ─┘ where all chunks lie

The names, and the index `.metadata`, are those of torch.distributed.checkpoint, whose tools read
such a checkpoint too. Shoal's own index is beside it: see `tensor_index`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal.errors import CheckpointError
from shoal.train.checkpoint import manifest, tensor_index
from shoal.train.checkpoint.block_digest import BlockDigest
from shoal.train.checkpoint.chunks import TensorEntry
from shoal.train.checkpoint.durable_io import durable_stream
from shoal.train.checkpoint.manifest import StoredFile
from shoal.train.checkpoint.rank_consensus import rank
from shoal.train.checkpoint.tensor_index import HeldChunks
from shoal.train.checkpoint.tensor_zip import around

LayoutLookup = Callable[[str], Tensor | None]


def no_layout(_: str) -> None:
    """Return None for every name: every tensor is read in full."""


def held_chunks(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Return what this rank holds of each tensor, as JSON values: shape, dtype, and its chunk."""
    return {name: _held(tensor) for name, tensor in tensors.items()}


def write(
    directory: Path, tensors: Mapping[str, Tensor], held: Sequence[HeldChunks]
) -> tuple[dict[str, StoredFile], dict[str, dict[str, Any]]]:
    """Write this rank's share of `tensors`, fsync it, and read it back. Sends nothing.

    Args:
        directory: exists and is empty.
        tensors: of any shape, dtype, device and strides. A chunk that several ranks hold under one
            name is written by one of them.
        held: `held_chunks` of all ranks, in the order of ranks.

    Returns: the files that this rank has written, by name; and where the chunk of each tensor lies
        that it has written, as in the index.
    Raises:
        CheckpointError: what was read back is not what was written.
    """
    name = f"__{rank()}_0.distcp"
    share = [key for key, writer in _writers(held).items() if writer == rank()]
    if not share:
        return {}, {}
    chunks, position = {}, 0
    with (
        durable_stream(directory / name, BlockDigest()) as (file, stream),
        torch.no_grad(),
        ThreadPoolExecutor(max_workers=1) as thread,
    ):
        for key, offsets in share:
            numbers = _numbers(tensors[key])
            head, tail = around(numbers.dtype, numbers.shape, numbers.nbytes, position)
            for piece in (head, _bytes_of(numbers), tail):
                stream.write(piece)
            size_bytes = len(head) + numbers.nbytes + len(tail)
            chunks[key] = {
                "offsets": list(offsets),
                "shape": list(numbers.shape),
                "file": name,
                "start_bytes": position,
                "size_bytes": size_bytes,
                "data_start_bytes": position + len(head),
            }
            position += size_bytes
        stream.flush()
        # The disk works while the file is read back from memory.
        synced = thread.submit(os.fsync, file.fileno())
        stored = StoredFile(file.size_bytes, blocks=file.digest.hexdigest())
        defect = manifest.defect(directory, name, stored)
        synced.result()
    if defect:
        raise CheckpointError(f"it was written, but reading it back failed; {defect}")
    return {name: stored}, chunks


def read(
    directory: Path, is_wanted: Callable[[str], bool], like: LayoutLookup = no_layout
) -> dict[str, Tensor]:
    """Read the tensors that `is_wanted` accepts by name, contiguous, on the CPU. Sends nothing.

    Args:
        like: name -> a tensor in the layout of this run, or None. If it is a DTensor, this rank
            reads its own shard only. Otherwise it reads the full tensor.

    Raises:
        CheckpointError: an entry is no tensor, or a file holds something else than the index says.
    """
    return {
        name: _read(entry, like(name))
        for name, entry in tensor_index.stored(directory).items()
        if is_wanted(name)
    }


def _held(tensor: Tensor) -> dict[str, Any]:
    offsets, shape = [0] * tensor.dim(), list(tensor.shape)
    if isinstance(tensor, DTensor):
        offsets, shape = _place_of_shard(tensor)
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "full_shape": list(tensor.shape),
        "offsets": offsets,
        "shape": shape,
    }


def _place_of_shard(tensor: DTensor) -> tuple[list[int], list[int]]:
    """Return offsets and shape of this rank's shard in the full tensor."""
    (chunk,) = tensor.__create_chunk_list__()
    return list(chunk.offsets), list(chunk.sizes)


def _writers(held: Sequence[HeldChunks]) -> dict[tuple[str, tuple[int, ...]], int]:
    """Return the rank that writes each chunk, by name and offsets. Empty chunks are not written.

    The largest come first, each to the rank of its holders with the fewest bytes so far.
    """
    holders: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    sizes = {}
    for holder, chunks in enumerate(held):
        for name, chunk in chunks.items():
            itemsize = getattr(torch, chunk["dtype"]).itemsize
            if size_bytes := itemsize * torch.Size(chunk["shape"]).numel():
                key = name, tuple(chunk["offsets"])
                holders.setdefault(key, []).append(holder)
                sizes[key] = size_bytes
    loads = [0] * len(held)
    writers = {}
    for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
        writers[key] = min(holders[key], key=lambda holder: loads[holder])
        loads[writers[key]] += sizes[key]
    return writers


def _numbers(tensor: Tensor) -> Tensor:
    """Return the numbers of this rank's chunk on the CPU, row by row."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().resolve_conj().resolve_neg().cpu().contiguous()


def _bytes_of(numbers: Tensor) -> Any:
    return numbers.reshape(-1).view(torch.uint8).numpy()


def _read(entry: TensorEntry, like: Tensor | None) -> Tensor:
    if isinstance(like, DTensor) and like.shape == entry.shape:
        shard = torch.empty_like(like.detach(), dtype=entry.dtype)
        assert isinstance(shard, DTensor)
        offsets, _ = _place_of_shard(shard)
        _fill(shard.to_local(), offsets, entry)
        return shard
    if len(entry.chunks) == 1 and entry.chunks[0].shape == tuple(entry.shape):
        return entry.chunks[0].read().contiguous()
    full = torch.empty(entry.shape, dtype=entry.dtype)
    _fill(full, [0] * full.dim(), entry)
    return full


def _fill(block: Tensor, offsets: Sequence[int], entry: TensorEntry) -> None:
    """Fill a block of the full tensor, which begins at `offsets`, from all chunks that overlap."""
    for chunk in entry.chunks:
        ours, theirs = [], []
        for start, size, chunk_start, chunk_size in zip(
            offsets, block.shape, chunk.offsets, chunk.shape, strict=True
        ):
            first, end = max(start, chunk_start), min(start + size, chunk_start + chunk_size)
            ours.append(slice(first - start, max(first, end) - start))
            theirs.append(slice(first - chunk_start, max(first, end) - chunk_start))
        if (part := block[tuple(ours)]).numel():
            part.copy_(chunk.mapped()[tuple(theirs)])
