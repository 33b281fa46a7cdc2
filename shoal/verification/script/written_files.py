"""Files that a script writes: tensors are kept with the record, away from the user's own files.

torch.save(state, "model.pt")     the record's files/0-model.pt
run.save("model.pt")              the record's files/1-model.pt
torch.load("model.pt")            reads what this run has written there last, else the user's
run.checkpoint("checkpoints")     resumes from none and writes none: every run begins at step 0
run.log_to("jsonl")               opens no logger
open("metrics.csv", "a")          a copy beside the record's files, if it was there already
save_file(state, "best.st")       the same, and one more in the record; so run.save_pretrained
os.replace("new", "best")         the same as open
"""

from __future__ import annotations

import builtins
import io
import os
import shutil
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from shoal.checkpoint import Checkpoints
from shoal.checkpoint.manifest import name_of
from shoal.data.tree_map import items_of
from shoal.platform.script_line import caller, is_called_by_script
from shoal.run import Run
from shoal.verification.differences import differences
from shoal.verification.script.watched_calls import watch


class WrittenFiles:
    """Redirects or drops what this process writes by torch and Shoal.

    Args: folder: for the files; it is made.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places: dict[str, Path] = {}
        self._saves = Counter[str]()
        # Of files that were there already. Whether they were differs from run to run, so these are
        # not compared.
        self._copies: dict[str, Path] = {}
        self._is_saving = False  # by run.save_pretrained, which calls save_file

    def start(self, stack: ExitStack) -> None:
        """Redirect until the stack is closed."""
        watch(stack, torch, "save", self._save)
        watch(stack, torch, "load", self._load)
        watch(stack, Run, "save", self._save_run)
        watch(stack, Run, "save_pretrained", self._save_pretrained)
        watch(stack, safetensors.torch, "save_file", self._save_file)
        for module, name in ((builtins, "open"), (io, "open")):
            watch(stack, module, name, self._open)
        for name in ("replace", "rename"):
            watch(stack, os, name, self._rename)
        watch(stack, Run, "log_to", open_no_logger)
        watch(stack, Checkpoints, "load", lambda *_, **__: None)
        watch(stack, Checkpoints, "write", _write_no_checkpoint)

    def _save(self, original: Any, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        original(obj, self._place(f) if isinstance(f, str | os.PathLike) else f, *args, **kwargs)

    def _load(self, original: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(f, str | os.PathLike):
            place = self._places.get(os.path.realpath(f))
            if place is not None and not place.exists():  # run.save lets the first rank write
                place = self._folder.parents[1] / "rank-0" / self._folder.name / place.name
            f = f if place is None else place
        return original(f, *args, **kwargs)

    def _save_run(self, original: Any, run: Run, path: str | Path) -> None:
        original(run, self._place(path))  # which writes through an open file

    def _save_pretrained(
        self, original: Any, run: Run, path: Any, *args: Any, **options: Any
    ) -> None:
        written = self._beside(path)
        self._is_saving = True
        try:
            original(run, written, *args, **options)
        finally:
            self._is_saving = False
        if run.rank == 0:
            shutil.copytree(written, self._place(path))

    def _save_file(self, original: Any, saved: Any, path: Any, *args: Any, **options: Any) -> None:
        written = self._beside(path)
        original(saved, written, *args, **options)
        if not self._is_saving:
            shutil.copyfile(written, self._place(path))

    def _open(self, original: Any, file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if {*mode} & {*"wa+"} and is_called_by_script(caller(2)):
            file = self._beside(file, keeps="w" not in mode)
        elif isinstance(file, str | os.PathLike):
            file = self._copies.get(os.path.realpath(file), file)
        return original(file, mode, *args, **options)

    def _rename(self, original: Any, src: Any, dst: Any, **options: Any) -> None:
        original(src, self._beside(dst) if is_called_by_script(caller(2)) else dst, **options)

    def _beside(self, path: Any, keeps: bool = False) -> Any:
        """Return the place of a copy of what is there already; else the path.

        Args: keeps: the copy begins with what is there.
        """
        is_path = isinstance(path, str | os.PathLike)
        if not is_path or not Path(path).exists() or Path(path).is_char_device():
            return path
        key = os.path.realpath(path)
        if key not in self._copies:
            folder = self._folder.with_name("copies")
            folder.mkdir(parents=True, exist_ok=True)
            place = folder / f"{len(self._copies)}-{Path(path).name}"
            if keeps:
                shutil.copyfile(path, place)
            self._copies[key] = place
        return self._copies[key]

    def _place(self, path: str | os.PathLike[str]) -> Path:
        """Return the place of a save: the same on all ranks, of which one may write it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        name = Path(path).name
        place = self._folder / f"{self._saves[name]}-{name}"
        self._saves[name] += 1
        self._places[os.path.realpath(path)] = place
        return place


def open_no_logger(original: Any, run: Run, *_: Any, **__: Any) -> None:
    """Let `run.log` return its means, and write them nowhere."""
    original(run)


def _write_no_checkpoint(_: Any, checkpoints: Checkpoints, division: Any, *__: Any) -> Path:
    return checkpoints.directory / name_of(division.step)


def compare_files(reference: Path, candidate: Path) -> dict[str, float]:
    """Return the largest relative error of each file that two records hold, by its name.

    It is infinite for a file that only one run has written, or that has other tensors. Files of
    anything but tensors, numbers and texts are not read.

    Args: reference, candidate: folders of one rank's files.
    """
    names = sorted(
        {
            file.relative_to(folder).as_posix()
            for folder in (reference, candidate)
            for file in folder.rglob("*")
            if file.is_file()
        }
    )
    errors = {}
    for name in names:
        one, many = _tensors(reference / name), _tensors(candidate / name)
        if one is None or many is None:
            continue
        known = {**dict.fromkeys(many), **one}
        errors[name.partition("-")[2]] = max(differences(known, many).values(), default=0.0)
    return errors


def _tensors(file: Path) -> dict[str, Tensor] | None:
    """Return the tensors of a file by their places; None for one that cannot be read safely."""
    if not file.exists():
        return {}
    try:
        if file.suffix == ".safetensors":
            return safetensors.torch.load_file(file)
        value = torch.load(file, map_location="cpu", weights_only=True)
    except Exception:  # noqa: BLE001 - whatever pickle may say of a file with other objects
        return None
    return dict(_leaves(value, ""))


def _leaves(value: Any, place: str) -> list[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        return [(place, value)]
    keys = list(value) if isinstance(value, dict) else range(len(items_of(value) or ()))
    items = items_of(value) or ()
    found: list[tuple[str, Tensor]] = []
    for key, item in zip(keys, items, strict=True):
        found += _leaves(item, f"{place}/{key}")
    return found
