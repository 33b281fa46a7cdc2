"""`shoal export`: the full model of a run in one safetensors file, saved by any strategy.

    checkpoint                 model.safetensors
      shard of rank 0            8 bytes: length of the header
        tensor 1, rows 0 1 2     header: JSON, name -> dtype, shape, offsets
        tensor 2, rows 0 1 2     tensor 1: rows 0 1 2, rows 3 4 5
      shard of rank 1            tensor 2: rows 0 1 2, rows 3 4 5
        tensor 1, rows 3 4 5     ...
        ...

One process maps one chunk at a time and writes it to its offset. So it needs no more than the
memory of the largest chunk: a shard of a tensor if a strategy that shards has saved it, a tensor
otherwise. The header can be written first, because the checkpoint's index has shapes and dtypes.
Source of the format: the safetensors project's description.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from shoal.errors import CheckpointError, UsageError
from shoal.platform.files import atomic_write
from shoal.train.checkpoint import Checkpoints
from shoal.train.checkpoint.chunks import Chunk, TensorEntry
from shoal.train.checkpoint.tensor_index import stored
from shoal.train.console import warn
from shoal.train.run_directory import job_of

SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
MODEL = "model."
AVERAGE = "ema."


@dataclass(frozen=True)
class Exported:
    """A model that was written.

    Attributes:
        from_ema: parameters are the moving average, as in an evaluation.
    """

    step: int
    tensors: int
    size_bytes: int
    from_ema: bool


def export(run: Path, output: Path, which: Literal["latest", "best"] = "latest") -> Exported:
    """Write the model of a run's checkpoint to `output`, under the model's own names.

    For one process. The checkpoint is verified first. One that is damaged is named on stderr, and
    the one before it is used. `output` is replaced in one piece or not at all. If the run has a
    moving average of its weights, that is written, because evaluations measure it.

    Raises:
        ConfigError: `run` is no run directory.
        CheckpointError: nothing was saved, nothing verifies, or the file cannot be written.
        UsageError: `output` is not a .safetensors file, or its directory is not there.
    """
    if output.suffix != ".safetensors":
        raise UsageError(
            f"-o {output}: the file is written in the safetensors format; name it "
            f"{output.stem}.safetensors."
        )
    if not output.parent.is_dir():
        raise UsageError(
            f"-o {output}: there is no directory {output.parent}. Make it, or give another -o."
        )
    job = job_of(run)
    path, step = Checkpoints(run / "checkpoints").choose(warn, which)
    if path is None:
        raise CheckpointError(
            f"{run} has no checkpoint yet. Train it first: shoal train {job.name}"
        )
    entries = stored(path)
    names = _stored_names(entries)
    tensors = {name: entries[stored_name] for name, stored_name in names.items()}
    try:
        size_bytes = _write(output, tensors, {"format": "pt", "run": job.name, "step": str(step)})
    except OSError as error:
        reason = f"{output} was not written: {error.strerror or error}"
        raise CheckpointError(f"{reason}. Make room or permit it, or give another -o.") from error
    averaged = any(stored_name.startswith(AVERAGE) for stored_name in names.values())
    return Exported(step, len(names), size_bytes, averaged)


def _stored_names(entries: Mapping[str, Any]) -> dict[str, str]:
    """Return for each name of the model the name of its tensor in the checkpoint."""
    names = sorted(name.removeprefix(MODEL) for name in entries if name.startswith(MODEL))
    # Buffers have no moving average.
    return {name: (AVERAGE if AVERAGE + name in entries else MODEL) + name for name in names}


def _write(output: Path, tensors: Mapping[str, TensorEntry], metadata: dict[str, str]) -> int:
    """Write the file. Return its size in bytes."""
    header, starts, end = _header(tensors, metadata)
    with atomic_write(output, survives="rename", mode=0o644) as stream:
        stream.write(header)
        for name, tensor in tensors.items():
            for chunk in tensor.chunks:
                _copy(chunk, tensor, stream, starts[name])
    return end


def _header(
    tensors: Mapping[str, TensorEntry], metadata: dict[str, str]
) -> tuple[bytes, dict[str, int], int]:
    """Return the header, the offset in bytes of each tensor in the file, and the file's size."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    starts = {}
    end = 0  # offsets in the header are counted from its end
    for name, tensor in tensors.items():
        starts[name] = end
        end += tensor.shape.numel() * tensor.dtype.itemsize
        entries[name] = {
            "dtype": _dtype(name, tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned to 8 bytes
    first = 8 + len(text)
    return (
        len(text).to_bytes(8, "little") + text,
        {name: first + start for name, start in starts.items()},
        first + end,
    )


def _copy(chunk: Chunk, tensor: TensorEntry, stream: io.BufferedWriter[Any], start: int) -> None:
    """Write one chunk to its offsets in a tensor that starts at byte `start`.

    The chunk is freed on return, before the next one is read.
    """
    values = chunk.mapped().contiguous().reshape(-1).view(torch.uint8).numpy().data
    done = 0
    for first, length in chunk.runs(tensor.shape):
        size_bytes = length * tensor.dtype.itemsize
        stream.seek(start + first * tensor.dtype.itemsize)
        stream.write(values[done : done + size_bytes])
        done += size_bytes


def _dtype(name: str, dtype: torch.dtype) -> str:
    if dtype not in SAFETENSORS_NAMES:
        raise CheckpointError(f"{name} is {dtype}, which the safetensors format does not know.")
    return SAFETENSORS_NAMES[dtype]
