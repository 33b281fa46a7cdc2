"""`shoal export`: the full model of a run in one safetensors file, saved by any strategy.

    checkpoint                 model.safetensors
      shard of rank 0            8 bytes: length of the header
        tensor 1, rows 0 1 2     header: JSON, name -> dtype, shape, offsets
        tensor 2, rows 0 1 2     tensor 1: rows 0 1 2, rows 3 4 5
      shard of rank 1            tensor 2: rows 0 1 2, rows 3 4 5
        tensor 1, rows 3 4 5     ...
        ...

One process reads one tensor at a time, so it needs little more than the memory of the largest. The
header can be written first, because the checkpoint's index has shapes and dtypes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shoal.checkpoint import Checkpoints, Which, read_info, shard_format
from shoal.checkpoint.tensor_files import blocks
from shoal.checkpoint.tensor_index import TensorEntry, stored
from shoal.errors import CheckpointError, UsageError
from shoal.platform.files import atomic_write
from shoal.train.console import warn
from shoal.train.run_directory import job_of

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


def export(run: Path, output: Path, which: Which = "latest") -> Exported:
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
            f"{output.with_suffix('.safetensors')}."
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
    entries, tied = stored(path), read_info(path).get("tied", {})
    own = sorted(name.removeprefix(MODEL) for name in entries if name.startswith(MODEL))
    # Buffers have no moving average; a tied weight has one under its first name.
    averages = {name: AVERAGE + tied.get(name, name) for name in own}
    names = {n: key if key in entries else MODEL + n for n, key in averages.items()}
    shapes = {name: (entries[key].dtype, entries[key].shape) for name, key in names.items()}
    for name, (dtype, _) in shapes.items():
        if dtype not in shard_format.NAMES:
            raise CheckpointError(f"{name} is {dtype}, which the safetensors format does not know.")
    metadata = {"format": "pt", "run": job.name, "step": str(step)}
    head, starts, size_bytes = shard_format.header(shapes, metadata)
    try:
        with atomic_write(output, survives="rename", mode=0o644) as stream:
            stream.write(head)
            for name in starts:
                stream.write(_whole(names[name], entries[names[name]]).numpy().data)
    except OSError as error:
        reason = f"{output} was not written: {error.strerror or error}"
        raise CheckpointError(f"{reason}. Make room or permit it, or give another -o.") from error
    averaged = any(stored_name.startswith(AVERAGE) for stored_name in names.values())
    return Exported(step, len(names), size_bytes, averaged)


def _whole(name: str, entry: TensorEntry) -> Tensor:
    """Return the bytes of a tensor of the checkpoint, of all of its chunks."""
    full = torch.empty(entry.shape, dtype=entry.dtype)
    for _, chunk, numbers in blocks((name, chunk) for chunk in entry.chunks):
        ends = map(sum, zip(chunk.offsets, chunk.shape, strict=True))
        full[tuple(map(slice, chunk.offsets, ends))] = numbers
    return full.reshape(-1).view(torch.uint8)
