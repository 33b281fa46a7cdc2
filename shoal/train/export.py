"""`shoal export`: the plain whole model of a run in one safetensors file, whatever strategy has saved it.

    checkpoint (shards)       model.safetensors
      tensor 1  ──read──>       8 bytes: length of the header
      tensor 2                  header: JSON, name -> dtype, shape, place
      ...                       tensor 1, tensor 2, ...

One process, one tensor at a time: memory is a few times that of the largest one. The header can be written first,
because the checkpoint's index knows shapes and dtypes. Source of the format: the safetensors project's description.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from shoal.errors import CheckpointError, UsageError
from shoal.train.checkpoint import Checkpoints, tensor_files
from shoal.train.checkpoint.durable import durable_stream, fsync_directory
from shoal.train.directory import job_of

DTYPES = {
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
MODEL, AVERAGE = "model.", "ema."


@dataclass(frozen=True)
class Exported:
    """What was written: `averaged` says that parameters are the moving average, as in an evaluation."""

    step: int
    tensors: int
    size_bytes: int
    averaged: bool


def export(run: Path, output: Path, which: Literal["latest", "best"] = "latest") -> Exported:
    """Write the model of a run's checkpoint to `output`, under the model's own names. For one process.

    The checkpoint is verified first. `output` is replaced in one piece or not at all. Where the run keeps a moving
    average of its weights, that is written: it is what evaluations measure.

    Raises:
        ConfigError: `run` is no run directory.
        CheckpointError: nothing was saved, nothing verifies, or the file cannot be written.
        UsageError: `output` is not a .safetensors file.
    """
    if output.suffix != ".safetensors":
        raise UsageError(
            f"-o {output}: the file is written in the safetensors format; name it {output.stem}.safetensors."
        )
    job = job_of(run)
    path, step = Checkpoints(run / "checkpoints").choose(which)
    if path is None:
        raise CheckpointError(f"{run} has no checkpoint yet. Train it first: shoal train {job.name}")
    names = _names(tensor_files.shapes(path))
    try:
        size_bytes = _write(path, output, names, {"format": "pt", "run": job.name, "step": str(step)})
    except OSError as error:
        raise CheckpointError(f"{output} was not written: {error}") from error
    averaged = any(stored.startswith(AVERAGE) for stored in names.values())
    return Exported(step, len(names), size_bytes, averaged)


def _names(stored: Mapping[str, Any]) -> dict[str, str]:
    """The model's own names, and under which name the checkpoint holds each."""
    own = [name.removeprefix(MODEL) for name in stored if name.startswith(MODEL)]
    return {name: AVERAGE + name if AVERAGE + name in stored else MODEL + name for name in sorted(own)}


def _write(path: Path, output: Path, names: Mapping[str, str], metadata: dict[str, str]) -> int:
    shapes = tensor_files.shapes(path)
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, stored in names.items():
        shape, dtype = shapes[stored]
        start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": _dtype(name, dtype), "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin aligned
    partial = output.with_name(output.name + ".tmp")
    try:
        with durable_stream(partial) as (_, stream):
            stream.write(len(text).to_bytes(8, "little") + text)
            for tensor in _tensors(path, names):
                stream.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        os.replace(partial, output)
    finally:
        partial.unlink(missing_ok=True)
    fsync_directory(output.absolute().parent)
    return 8 + len(text) + end


def _tensors(path: Path, names: Mapping[str, str]) -> Iterator[Tensor]:
    for stored in names.values():
        yield tensor_files.read(path, stored.__eq__)[stored]


def _dtype(name: str, dtype: torch.dtype) -> str:
    if dtype not in DTYPES:
        raise CheckpointError(f"{name} is {dtype}, which the safetensors format does not know.")
    return DTYPES[dtype]
