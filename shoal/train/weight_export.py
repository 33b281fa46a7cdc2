"""`shoal export`: the full model of a run in safetensors files, saved by any strategy.

    checkpoint                 model.safetensors
      shard of rank 0            8 bytes: length of the header
        tensor 1, rows 0 1 2     header: JSON, name -> dtype, shape, offsets
        tensor 2, rows 0 1 2     tensor 1: rows 0 1 2, rows 3 4 5
      shard of rank 1            tensor 2: rows 0 1 2, rows 3 4 5
        tensor 1, rows 3 4 5     ...
        ...

One process reads one tensor at a time, so it needs little more than the memory of the largest. The
header can be written first, because the checkpoint's index has shapes and dtypes. A directory gets
the form of the Hub (huggingface_hub): shards, and an index that says which one has which tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from shoal.checkpoint import Checkpoints, Which, read_info, shard_format
from shoal.checkpoint.tensor_files import blocks
from shoal.checkpoint.tensor_index import TensorEntry, stored
from shoal.errors import CheckpointError, UsageError
from shoal.platform.files import atomic_write
from shoal.train.console import warn
from shoal.train.run_directory import job_of
from shoal.weights.weight_files import INDEX, SINGLE

MODEL = "model."
AVERAGE = "ema."
SHARD_BYTES = 5e9
"""The largest shard of a directory by default, as that of huggingface_hub."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Forms = Mapping[str, tuple[torch.dtype, torch.Size]]
"""The dtype in which a tensor is written, and its shape, by name."""


@dataclass(frozen=True)
class Exported:
    """A model that was written.

    Attributes:
        from_ema: parameters are the moving average, as in an evaluation.
        files: those with weights; with several there is an index besides.
    """

    step: int
    tensors: int
    size_bytes: int
    from_ema: bool
    files: int


def export(
    run: Path,
    output: Path,
    which: Which = "latest",
    dtype: str | None = None,
    max_shard_bytes: float | None = None,
) -> Exported:
    """Write the model of a run's checkpoint to `output`, under the model's own names.

    For one process. The checkpoint is verified first. One that is damaged is named on stderr, and
    the one before it is used. A file is replaced in one piece or not at all. A directory gets one
    name of each tied weight. If the run has a moving average of its weights, that is written,
    because evaluations measure it.

    Args:
        dtype: of DTYPES, to which floating-point tensors are converted.
        max_shard_bytes: of a directory; a larger tensor has a shard of its own.

    Raises:
        ConfigError: `run` is no run directory.
        CheckpointError: nothing was saved, nothing verifies, a tensor does not fit the dtype, or
            the files cannot be written.
        UsageError: `output` is no .safetensors file and no directory without weights, or its
            directory is not there.
    """
    is_file = output.suffix == ".safetensors"
    _check_output(output, is_file, max_shard_bytes)
    job = job_of(run)
    path, step = Checkpoints(run / "checkpoints").choose(warn, which)
    if path is None:
        raise CheckpointError(
            f"{run} has no checkpoint yet. Train it first: shoal train {job.name}"
        )
    entries, tied = stored(path), read_info(path).get("tied", {})
    names = _stored_names(entries, tied)
    kept = [name for name in names if is_file or name not in tied]
    forms = {name: _form(name, entries[names[name]], dtype) for name in kept}
    shards = [kept] if is_file else _shards(forms, max_shard_bytes or SHARD_BYTES)
    metadata = {"format": "pt", "run": job.name, "step": str(step)}
    files = [output] if is_file else [output / SINGLE]
    if (count := len(shards)) > 1:
        files = [output / f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    size_bytes = 0
    try:
        with ExitStack() as opened:
            # None has its name before all are written, and the index is the last.
            if len(files) > 1:
                index = _index(forms, dict(zip(files, shards, strict=True)))
                _create(output / INDEX, opened).write(index.encode())
            for file, own in zip(files, shards, strict=True):
                stream = _create(file, opened)
                head, order, size = shard_format.header({n: forms[n] for n in own}, metadata)
                size_bytes += size
                stream.write(head)
                for name in order:
                    whole = _whole(names[name], entries[names[name]], forms[name][0])
                    stream.write(whole.numpy().data)
                stream.flush()
    except OSError as error:
        reason = f"{output} was not written: {error.strerror or error}"
        raise CheckpointError(f"{reason}. Make room or permit it, or give another -o.") from error
    averaged = any(stored_name.startswith(AVERAGE) for stored_name in names.values())
    return Exported(step, len(kept), size_bytes, averaged, len(files))


def _check_output(output: Path, is_file: bool, max_shard_bytes: float | None) -> None:
    """Raise UsageError if nothing can be written there."""
    if is_file and max_shard_bytes is not None:
        raise UsageError(
            f"-o {output}: --max-shard-size writes several files; name a directory, -o "
            f"{output.with_suffix('')}."
        )
    if not is_file and output.suffix and not output.is_dir():
        raise UsageError(
            f"-o {output}: the file is written in the safetensors format; name it "
            f"{output.with_suffix('.safetensors')}, or name a directory that is there."
        )
    if not output.parent.is_dir():
        raise UsageError(
            f"-o {output}: there is no directory {output.parent}. Make it, or give another -o."
        )
    # Readers would take the old file before the new index, or old shards for new ones.
    if not is_file and (old := sorted({*output.glob("model*.safetensors"), *output.glob(INDEX)})):
        raise UsageError(
            f"-o {output}: it has weights, {old[0].name}. Remove them, or give another -o."
        )


def _stored_names(entries: Mapping[str, TensorEntry], tied: Mapping[str, str]) -> dict[str, str]:
    """Return the names of the model's tensors, and under which each is in the checkpoint.

    Args: tied: a further name of a weight -> its first name, which alone has an average.
    """
    names = {}
    for name in sorted(key.removeprefix(MODEL) for key in entries if key.startswith(MODEL)):
        average = AVERAGE + tied.get(name, name)
        names[name] = average if average in entries else MODEL + name  # buffers have no average
    return names


def _form(name: str, entry: TensorEntry, dtype: str | None) -> tuple[torch.dtype, torch.Size]:
    """Return dtype and shape to write. Raise CheckpointError: the format lacks the dtype."""
    if entry.dtype not in shard_format.NAMES:
        raise CheckpointError(
            f"{name} is {entry.dtype}, which the safetensors format does not know."
        )
    converted = DTYPES[dtype] if dtype and entry.dtype.is_floating_point else entry.dtype
    return converted, torch.Size(entry.shape)


def _shards(forms: Forms, max_bytes: float) -> list[list[str]]:
    """Return the names of the tensors of each shard, in their order."""
    shards, size = [list[str]()], 0
    for name, form in forms.items():
        if shards[-1] and size + _bytes(form) > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += _bytes(form)
    return shards


def _bytes(form: tuple[torch.dtype, torch.Size]) -> int:
    return form[0].itemsize * form[1].numel()


def _index(forms: Forms, shards: Mapping[Path, list[str]]) -> str:
    """Return the text of the index, as huggingface_hub reads it."""
    where = {name: file.name for file, names in shards.items() for name in names}
    total_size = sum(map(_bytes, forms.values()))
    return json.dumps({"metadata": {"total_size": total_size}, "weight_map": where}, indent=2)


def _create(file: Path, opened: ExitStack) -> IO[bytes]:
    """Open a new file, which has its name from the end of `opened` on."""
    file.parent.mkdir(exist_ok=True)
    return opened.enter_context(atomic_write(file, survives="rename", mode=0o644))


def _whole(name: str, entry: TensorEntry, dtype: torch.dtype) -> Tensor:
    """Return the bytes of a tensor of the checkpoint, of all of its chunks, in a dtype.

    Raises: CheckpointError: a value is too large for the dtype.
    """
    full = torch.empty(entry.shape, dtype=dtype)
    for _, chunk, numbers in blocks((name, chunk) for chunk in entry.chunks):
        ends = map(sum, zip(chunk.offsets, chunk.shape, strict=True))
        part = full[tuple(map(slice, chunk.offsets, ends))]
        part.copy_(numbers)
        if dtype != entry.dtype and len(lost := numbers[part.isinf() & ~numbers.isinf()]):
            largest = torch.finfo(dtype).max
            raise CheckpointError(
                f"{name.partition('.')[2]} has the value {lost[0].item():g}, and those of {dtype} "
                f"end at {largest:g}. Use --dtype bf16 or fp32."
            )
    return full.reshape(-1).view(torch.uint8)
