"""Runs that an earlier version of Shoal has saved, as archives, and what comes of resuming them.

An archive holds a run directory as it is after half of its steps: its configuration, its metrics
and one checkpoint. Git keeps no modes of files, and checkpoints that others could write are
refused, so each is unpacked with the modes that a run gives them. When the form of checkpoints has
changed, the archives were written again in the new one, with the same bits.
"""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, load
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from .commands import shoal, shoal_in_ranks

ARCHIVES = Path(__file__).with_name("recorded") / "saved"
HALF, ALL = 4, 8
JOB: dict[str, Any] = {
    "data.name": "digits",
    "model.name": "mlp",
    "model.options.hidden": [6],
    "train.precision": "fp64",
    "train.batch_size": 24,
    "train.max_steps": ALL,
    "train.label_smoothing": 0.1,
    "optimizer.lr": 0.02,
    "optimizer.nesterov": True,
    "schedule.warmup_epochs": 0,
    "checkpoint.every_steps": HALF,
    "checkpoint.keep": 5,
    "log.every": 2,
    "log.tensorboard": False,
}
ADAMW = {"optimizer.name": "AdamW", "optimizer.weight_decay": 0.1, "optimizer.nesterov": False}
EXTRAS = {
    "train.ema": 0.9,
    "train.mixup": 0.4,
    "train.clip_norm": 0.5,
    "train.accumulate": 2,
    "optimizer.nesterov": True,
    "schedule.warmup_epochs": 0.1,
}


@dataclass(frozen=True)
class SavedRun:
    """Who saved, and with which settings besides JOB."""

    strategy: str
    ranks: int
    settings: Mapping[str, Any] = field(default_factory=dict)


SAVED = {
    "ddp": SavedRun("ddp", 2, EXTRAS),
    "zero3": SavedRun("zero3", 2, ADAMW),
    "tensor": SavedRun("tensor=2", 2),
    "pipeline": SavedRun("pipeline=2,balance=parameters", 2, ADAMW),
    "server": SavedRun("server=2", 2, ADAMW),
    "compressed": SavedRun("ddp,compress=topk=0.1", 2),
    "diloco": SavedRun("diloco=2", 2),
}
RESUMED = [
    *((name, saved.strategy, saved.ranks) for name, saved in SAVED.items()),
    ("ddp", "zero2", 2),
    ("zero3", "ddp", 3),
    ("tensor", "tensor=2,zero1", 4),
    ("pipeline", "single", 1),
    ("server", "server=2,replicas=2", 2),
    ("diloco", "ddp", 3),
]
"""Name of the archive, strategy and ranks that go on with it."""
RECORDED = "stale-servers"
"""The archive of a whole run with `--record`."""
RECORDED_RUN = SavedRun("server=2,staleness=async,part_mb=0.0005", 2, ADAMW)


def key(name: str, strategy: str, ranks: int) -> str:
    """The name of what comes of going on with an archive."""
    return f"{name}, gone on with by {strategy} on {ranks}"


def begin(name: str, directory: Path) -> None:
    """Train all steps of SAVED[name], and leave the directory as it was after half of them."""
    _train(directory, SAVED[name])
    checkpoints = directory / "checkpoints"
    shutil.rmtree(checkpoints / f"step-{ALL:08d}")
    (checkpoints / "latest").write_text(f"step-{HALF:08d}\n")
    (checkpoints / "best").unlink()
    lines = (directory / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["step"] <= HALF]
    (directory / "metrics.jsonl").write_text("".join(kept))


def begin_recorded(directory: Path) -> None:
    """Train all steps of RECORDED_RUN, with a record of its pushes."""
    _train(directory, RECORDED_RUN, "--record")
    shutil.rmtree(directory / "checkpoints" / f"step-{HALF:08d}")


def _train(directory: Path, saved: SavedRun, *words: str) -> None:
    """Train all steps, and leave nothing that tells where that was."""
    settings = {**JOB, **saved.settings, "strategy": saved.strategy, "out": str(directory)}
    flags = [[f"--{name}", _text(value)] for name, value in settings.items()]
    all_flags = [word for flag in flags for word in flag]
    shoal_in_ranks(saved.ranks, "train", "digits", *all_flags, *words)
    (directory / "curves.png").unlink()
    (directory / ".lock").unlink()
    for config in directory.rglob("config.yaml"):
        config.write_text(config.read_text().replace(str(directory), "run"))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def go_on(directory: Path, strategy: str, ranks: int) -> dict[str, Tensor]:
    """Resume the run in `directory` to its end; every tensor of its last checkpoint."""
    words = ["--out", directory, "--strategy", strategy]
    shoal_in_ranks(ranks, "train", directory / "config.yaml", *words)
    return tensors(last_checkpoint(directory))


def evaluated(directory: Path) -> dict[str, float]:
    """What `shoal eval` says about the run in `directory`, in this process."""
    ended = shoal("eval", directory, "--json")
    assert ended.code == 0, ended.err
    found: dict[str, float] = json.loads(ended.out)
    return found


def exported(directory: Path, file: Path) -> dict[str, Tensor]:
    """The model that `shoal export` writes of the run in `directory`."""
    ended = shoal("export", directory, "-o", file)
    assert ended.code == 0, ended.err
    return safetensors.torch.load_file(file)


def last_checkpoint(directory: Path) -> Path:
    """The checkpoint of the last step, which has to be there."""
    return directory / "checkpoints" / f"step-{ALL:08d}"


def tensors(checkpoint: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole, by torch.distributed.checkpoint alone."""
    reader = HuggingFaceStorageReader(str(checkpoint))
    found = {}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        stored = cast(TensorStorageMetadata, entry)
        found[name] = torch.empty(stored.size, dtype=stored.properties.dtype)
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    load(cast(dict[str, Any], found), storage_reader=reader, planner=planner, no_dist=True)
    return found


def compared_by_value(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The numbers of a checkpoint that are equal up to rounding on every machine."""
    return {
        name: value
        for name, value in found.items()
        if value.is_floating_point() and value.numel() and not name.startswith("rank")
    }


def keys(checkpoint: Path) -> dict[str, Any]:
    """Names in the manifest, and names, shapes and dtypes of tensors."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    found = sorted(tensors(checkpoint).items())
    shapes = {name: f"{tuple(value.shape)} {value.dtype}" for name, value in found}
    return {"manifest": sorted(_names(manifest, "")), "tensors": shapes}


def _names(value: Any, before: str) -> set[str]:
    """Dotted names of a nest of dicts and lists; what is in a list has no number in its name."""
    if isinstance(value, dict) and before != "contents.files":
        found = (_names(inner, f"{before}.{name}".lstrip(".")) for name, inner in value.items())
        return {before or ".", *(name for names in found for name in names)}
    if isinstance(value, list):
        return {before, *(name for inner in value for name in _names(inner, before))}
    return {before}


def pack(directory: Path, name: str) -> None:
    """Write a directory to its archive; equal directories give equal archives."""
    ARCHIVES.mkdir(parents=True, exist_ok=True)
    with tarfile.open(ARCHIVES / f"{name}.tar.xz", "w:xz", preset=9) as archive:
        for path in sorted(path for path in directory.rglob("*") if path.is_file()):
            content = path.read_bytes()
            member = tarfile.TarInfo(str(path.relative_to(directory)))
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def unpack(name: str, directory: Path) -> Path:
    """Make `directory` of an archive, with modes that no other user can write."""
    with tarfile.open(ARCHIVES / f"{name}.tar.xz") as archive:
        for member in archive:
            path = directory / member.name
            path.parent.mkdir(parents=True, exist_ok=True)
            content = archive.extractfile(member)
            assert content is not None
            path.write_bytes(content.read())
    for path in (directory, *directory.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return directory
