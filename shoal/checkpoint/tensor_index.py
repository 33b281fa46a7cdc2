"""The index of a checkpoint: for each tensor its dtype, its shape, and the files of its chunks.

    index.json   {"tensors": {"model.weight": {"dtype": "float32", "shape": [6, 4],
                  "chunks": [{"offsets": [0, 0], "shape": [3, 4], "file": "rank-00000.safetensors"},
                             {"offsets": [3, 0], "shape": [3, 4], "file": "rank-00001.safetensors"}
                            ]}}}

Rank 0 alone learns what all ranks hold, tells each what to write, and writes the index.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal.checkpoint.durable_io import durable_stream
from shoal.checkpoint.manifest import StoredFile
from shoal.errors import CheckpointError
from shoal.platform.ownership import read_text_of_file

FILE_NAME = "index.json"
DATA_NAME = re.compile(r"rank-\d{5,}\.safetensors")
MAX_BYTES = 1 << 30
HeldChunks = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Chunk:
    """A block of a tensor, of `shape` elements from index `offsets` on, under its name in `file`.

    a tensor of 6 rows, saved by zero3 on 2 ranks      offsets  shape
      rows 0 1 2   chunk in rank-00000.safetensors     (0, 0)   (3, n)
      rows 3 4 5   chunk in rank-00001.safetensors     (3, 0)   (3, n)
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path


@dataclass(frozen=True)
class TensorEntry:
    """A full tensor in a checkpoint, and the chunks that fill it without overlap."""

    shape: torch.Size
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


def file_name(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def held_chunks(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Return what this rank holds of each tensor, as JSON values: shape, dtype, and its chunk."""
    held = {}
    for name, tensor in tensors.items():
        offsets, shape = [0] * tensor.dim(), list(tensor.shape)
        if isinstance(tensor, DTensor):
            offsets, shape = place_of_shard(tensor)
        held[name] = {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "full_shape": list(tensor.shape),
            "offsets": offsets,
            "shape": shape,
        }
    return held


def place_of_shard(tensor: DTensor) -> tuple[list[int], list[int]]:
    """Return offsets and shape of this rank's shard in the full tensor."""
    (chunk,) = tensor.__create_chunk_list__()
    return list(chunk.offsets), list(chunk.sizes)


def shares(held: Sequence[HeldChunks]) -> list[list[str]]:
    """Return the names of the tensors of which each rank writes its chunk.

    A chunk that several ranks hold is written by one of them: the largest come first, each to the
    rank of its holders with the fewest bytes so far. Empty chunks are not written, but those of a
    tensor without elements.

    Args: held: `held_chunks` of all ranks, in the order of ranks.
    """
    holders: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    sizes = {}
    for holder, chunks in enumerate(held):
        for name, chunk in chunks.items():
            size_bytes = getattr(torch, chunk["dtype"]).itemsize * math.prod(chunk["shape"])
            if size_bytes or math.prod(chunk["full_shape"]) == 0:
                key = name, tuple(chunk["offsets"])
                holders.setdefault(key, []).append(holder)
                sizes[key] = size_bytes
    loads = [0] * len(held)
    found: list[list[str]] = [[] for _ in held]
    for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
        writer = min(holders[key], key=lambda holder: loads[holder])
        loads[writer] += sizes[key]
        found[writer].append(key[0])
    return found


def write(
    directory: Path, held: Sequence[HeldChunks], written: Sequence[Sequence[str]]
) -> StoredFile:
    """Write index.json, and wait until it is on the disk. Rank 0 calls it.

    Args:
        held: `held_chunks` of all ranks.
        written: `shares` of them.

    Raises:
        CheckpointError: the chunks of a tensor do not fill it.
    """
    tensors: dict[str, dict[str, Any]] = {}
    for chunks in held:
        for name, chunk in chunks.items():
            fields = {"dtype": chunk["dtype"], "shape": chunk["full_shape"], "chunks": []}
            tensors.setdefault(name, fields)
    for rank, names in enumerate(written):
        for name in names:
            chunk = {key: held[rank][name][key] for key in ("offsets", "shape")}
            tensors[name]["chunks"].append({**chunk, "file": file_name(rank)})
    for name, fields in tensors.items():
        _entry(directory, name, fields)
    with durable_stream(directory / FILE_NAME) as (file, stream):
        stream.write(json.dumps({"tensors": tensors}).encode())
    return StoredFile(file.size_bytes, file.digest.hexdigest())


def stored(directory: Path) -> dict[str, TensorEntry]:
    """Return every tensor in a checkpoint by name. Only the index is read.

    Raises:
        CheckpointError: there is no index, it is damaged, names other files than a checkpoint has,
            or the chunks of a tensor do not fill it.
    """
    try:
        document = json.loads(read_text_of_file(directory / FILE_NAME, MAX_BYTES))
        return {
            name: _entry(directory, name, fields) for name, fields in document["tensors"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"the index of {directory} cannot be read ({type(error).__name__}: {error})"
        ) from error


def _entry(directory: Path, name: str, fields: Mapping[str, Any]) -> TensorEntry:
    """Return an entry of index.json. Raises ValueError, KeyError or TypeError for a wrong one."""
    dtype = getattr(torch, fields["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} has the dtype {fields['dtype']!r}")
    shape = _numbers(fields["shape"])
    chunks = []
    for block in fields["chunks"]:
        if not DATA_NAME.fullmatch(block["file"]):
            raise ValueError(f"{name} lies in {block['file']!r}, which no checkpoint contains")
        offsets, sizes = _numbers(block["offsets"]), _numbers(block["shape"])
        ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
        if any(end > limit for end, limit in zip(ends, shape, strict=True)):
            raise ValueError(f"{name} of {shape} has a chunk that ends at {ends}")
        chunks.append(Chunk(offsets, sizes, dtype, directory / block["file"]))
    count = sum(math.prod(chunk.shape) for chunk in chunks)
    if count != math.prod(shape):
        raise CheckpointError(f"{directory} has {count} numbers of {name}, not {math.prod(shape)}")
    return TensorEntry(torch.Size(shape), dtype, tuple(chunks))


def _numbers(values: Any) -> tuple[int, ...]:
    if not all(type(value) is int and 0 <= value < 1 << 63 for value in values):
        raise ValueError(f"{values!r} are no sizes")
    return tuple(values)
