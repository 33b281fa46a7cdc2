"""The index of a checkpoint: for each tensor its dtype, its shape, and the bytes of its chunks.

    index.json   {"format": 1, "tensors": {"model.weight": {"dtype": "float32", "shape": [6, 4],
                  "chunks": [{"offsets": [0, 0], "shape": [3, 4], "file": "__0_0.distcp",
                              "start_bytes": 0, "size_bytes": 976,
                              "data_start_bytes": 448}, ...]}}}
    .metadata    the same as a pickle, for torch's own tools

Shoal reads `.metadata` only in checkpoints of versions that wrote no index.json. A pickle is a
program, so it is read by an unpickler that knows the names of this one format and no others.
"""

from __future__ import annotations

import json
import math
import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp

from shoal.errors import CheckpointError
from shoal.platform.ownership import read_text_of_file
from shoal.platform.torch_private.checkpoint_files import StorageInfo
from shoal.train.checkpoint.chunks import Chunk, TensorEntry
from shoal.train.checkpoint.durable_io import durable_stream
from shoal.train.checkpoint.manifest import StoredFile

FILE_NAME = "index.json"
TORCH_FILE_NAME = ".metadata"
DATA_NAME = re.compile(r"__\d+_\d+\.distcp")
FORMAT = 1
MAX_BYTES = 1 << 30
Entries = dict[str, TensorEntry]
HeldChunks = Mapping[str, Mapping[str, Any]]


def stored(directory: Path) -> Entries:
    """Return every tensor in a checkpoint by name. Only the index is read, and runs no code.

    Raises:
        CheckpointError: there is no index, it is damaged, names other files than a checkpoint has,
            or the chunks of a tensor do not fill it.
    """
    path = directory / FILE_NAME
    try:
        if not path.exists():
            return from_torch(_unpickled(directory / TORCH_FILE_NAME), directory)
        document = json.loads(read_text_of_file(path, MAX_BYTES))
        if document["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has format {document['format']!r}; this version reads format {FORMAT}"
            )
        return {
            name: _entry(directory, name, fields) for name, fields in document["tensors"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"the index of {directory} cannot be read ({type(error).__name__}: {error})"
        ) from error


def write(
    directory: Path, held: Sequence[HeldChunks], chunks: Sequence[Mapping[str, Mapping[str, Any]]]
) -> dict[str, StoredFile]:
    """Write index.json and `.metadata`, and wait until they are on the disk.

    Args:
        held: what each rank holds, by name: dtype and shapes (`tensor_files.held_chunks`).
        chunks: where each rank has written which chunk, by name.

    Returns: both files by name.
    Raises:
        CheckpointError: the chunks of a tensor do not fill it.
    """
    tensors: dict[str, dict[str, Any]] = {}
    for of_rank in held:
        for name, chunk in of_rank.items():
            fields = {"dtype": chunk["dtype"], "shape": chunk["full_shape"]}
            tensors.setdefault(name, fields | {"chunks": []})
    for share in chunks:
        for name, place in share.items():
            tensors[name]["chunks"].append(place)
    entries = {name: _entry(directory, name, fields) for name, fields in tensors.items()}
    texts = {
        FILE_NAME: json.dumps({"format": FORMAT, "tensors": tensors}).encode(),
        TORCH_FILE_NAME: pickle.dumps(_to_torch(entries)),
    }
    return {name: _written(directory / name, text) for name, text in texts.items()}


def _written(path: Path, text: bytes) -> StoredFile:
    with durable_stream(path) as (file, stream):
        stream.write(text)
    return StoredFile(file.size_bytes, file.digest.hexdigest())


def from_torch(metadata: dcp.Metadata, directory: Path) -> Entries:
    """Return the entries of torch's index, of which each must be a tensor.

    Raises:
        CheckpointError: an entry is no tensor, or not filled by its chunks.
        KeyError: a chunk has no bytes.
    """
    entries: Entries = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, dcp.TensorStorageMetadata):
            raise CheckpointError(f"{directory} has an entry that is no tensor: {name}")
        chunks = []
        for block in entry.chunks:
            # A rank may hold an empty shard, for which torch's index has no file.
            if math.prod(block.sizes) > 0:
                at = metadata.storage_data[dcp.MetadataIndex(name, block.offsets)]
                place = {"file": at.relative_path, "start_bytes": at.offset}
                chunks.append(
                    {
                        "offsets": list(block.offsets),
                        "shape": list(block.sizes),
                        **place,
                        "size_bytes": at.length,
                    }
                )
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        fields = {"dtype": dtype, "shape": list(entry.size), "chunks": chunks}
        entries[name] = _entry(directory, name, fields)
    return entries


def _to_torch(entries: Mapping[str, TensorEntry]) -> dcp.Metadata:
    """Return the entries as the index that torch's planner and reader take."""
    state, ranges = {}, {}
    for name, entry in entries.items():
        chunks = []
        for chunk in entry.chunks:
            offsets = torch.Size(chunk.offsets)
            chunks.append(dcp.ChunkStorageMetadata(offsets, torch.Size(chunk.shape)))
            ranges[dcp.MetadataIndex(name, offsets)] = StorageInfo(
                chunk.file.name, chunk.start_bytes, chunk.size_bytes
            )
        properties = dcp.TensorProperties(dtype=entry.dtype)
        state[name] = dcp.TensorStorageMetadata(properties, entry.shape, chunks)
    return dcp.Metadata(dict(state), storage_data=ranges, storage_meta=dcp.StorageMeta())


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
        start_bytes, size_bytes = _numbers([block["start_bytes"], block["size_bytes"]])
        data_start_bytes = block.get("data_start_bytes")
        if data_start_bytes is not None:
            (data_start_bytes,) = _numbers([data_start_bytes])
            data_end_bytes = data_start_bytes + math.prod(sizes) * dtype.itemsize
            if not start_bytes <= data_start_bytes <= data_end_bytes <= start_bytes + size_bytes:
                raise ValueError(f"the numbers of {name} lie outside of its chunk")
        file = directory / block["file"]
        chunks.append(Chunk(offsets, sizes, dtype, file, start_bytes, size_bytes, data_start_bytes))
    count = sum(math.prod(chunk.shape) for chunk in chunks)
    if count != math.prod(shape):
        raise CheckpointError(f"{directory} has {count} numbers of {name}, not {math.prod(shape)}")
    return TensorEntry(torch.Size(shape), dtype, tuple(chunks))


def _numbers(values: Any) -> tuple[int, ...]:
    if not all(type(value) is int and 0 <= value < 1 << 63 for value in values):
        raise ValueError(f"{values!r} are no sizes")
    return tuple(values)


class _Fields:
    """An object of torch's in a pickle, with its fields."""

    def __init__(self, *_: Any) -> None:
        """Take the value of an enumeration, which is not needed."""


class _Properties(_Fields):
    """The properties of a tensor, of which only the dtype is still in use."""

    dtype: torch.dtype

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype = state[0]


_STAND_INS: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _Fields,
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib._local", "PosixPath"): PurePosixPath,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Fields,
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): _Fields,
    ("torch.distributed.checkpoint.metadata", "TensorProperties"): _Properties,
    **{
        (dcp.__name__, kind.__name__): kind
        for kind in (
            dcp.Metadata,
            dcp.TensorStorageMetadata,
            dcp.BytesStorageMetadata,
            dcp.ChunkStorageMetadata,
            dcp.MetadataIndex,
            dcp.StorageMeta,
        )
    },
}
"""Stand-ins for the names in torch's index. None of them is a function that does anything."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _STAND_INS:
            return _STAND_INS[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise ValueError(f"it names {module}.{name}, which no checkpoint needs; nothing was run")


def _unpickled(path: Path) -> dcp.Metadata:
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
    except (pickle.UnpicklingError, EOFError, IndexError, MemoryError) as error:
        raise ValueError(str(error) or type(error).__name__) from error
    if not isinstance(metadata, dcp.Metadata):
        raise ValueError(f"{path.name} holds a {type(metadata).__name__}")
    return metadata
