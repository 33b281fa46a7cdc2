"""The checkpoints of a directory: which can be loaded, and which stay after a save.

newest first    step-9   step-8   step-7   step-6   step-5
keep=2          stays    corrupt  stays    pruned   stays: the best one
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from shoal.checkpoint import manifest
from shoal.checkpoint.durable_io import replace_durably
from shoal.checkpoint.manifest import name_of, step_of
from shoal.errors import CheckpointError
from shoal.platform.files import fsync_directory
from shoal.platform.ownership import read_text_of_file, untrusted_reason

MAX_HINT_BYTES = 100
LEFTOVER_NAME = re.compile(r"(step-\d{8,}|latest|best)\.tmp")

Which = Literal["latest", "best"] | int
"""A checkpoint of a run: the newest, the best, or that of a step."""


def newest(directory: Path) -> Path | None:
    """Return the newest checkpoint that verifies; None if nothing was saved. For one process.

    Raises:
        CheckpointError: there are checkpoints and none verifies, or other users can write the
            directory.
    """
    name, _ = newest_good(directory)
    return directory / name if name else None


def read_info(path: Path) -> dict[str, Any]:
    """Return the `info` that a checkpoint was saved with. Reads only the manifest.

    Raises:
        CheckpointError: the manifest is missing, unreadable or altered.
    """
    return dict(manifest.read(path).info)


def saved_names(directory: Path) -> list[str]:
    """Return names of checkpoints, complete or not, the newest first."""
    if not directory.exists():
        return []
    if reason := untrusted_reason(directory.resolve()):
        raise CheckpointError(reason)
    steps = [step for name in os.listdir(directory) if (step := step_of(name)) is not None]
    return [name_of(step) for step in sorted(steps, reverse=True)]


def pointed_at(hint: Path) -> str | None:
    """Return the name in a hint file (`latest`, `best`); None if it is missing or damaged."""
    try:
        name = read_text_of_file(hint, MAX_HINT_BYTES).strip()
    except (OSError, ValueError):
        return None
    return name if step_of(name) is not None else None


def newest_good(
    directory: Path, spoiled: Mapping[str, list[str]] | None = None
) -> tuple[str | None, list[str]]:
    """Return the newest checkpoint that verifies, and a sentence for each one that was skipped.

    Args: spoiled: problems by the name of a checkpoint. If given, all others are compared later:
        now only presence and sizes of their files count.
    """
    names = saved_names(directory)
    sentences = _problems_of_hint(directory / "latest", names)
    for name in names:
        if not (problems := _problems(directory, name, spoiled)):
            return name, sentences
        sentences.append(f"checkpoint {name} is skipped: {'; '.join(problems)}")
    if names:
        cure = "none is left. Restore one, or move them away if the run shall start afresh"
        raise CheckpointError("\n  ".join([*sentences, cure]))
    return None, sentences


def checkpoint_at(
    directory: Path, which: Which, spoiled: Mapping[str, list[str]] | None = None
) -> str:
    """Return the name of the best checkpoint, or of that of a step; not of the latest one.

    Args: spoiled: as in `newest_good`.

    Raises:
        CheckpointError: it does not exist or does not verify.
    """
    name = name_of(which) if isinstance(which, int) else pointed_at(directory / "best")
    names = saved_names(directory)
    if name is None:
        raise CheckpointError("no checkpoint is marked as the best one")
    if name not in names:
        raise CheckpointError(f"{name} is not there; there are: {', '.join(names) or 'none'}")
    if problems := _problems(directory, name, spoiled):
        raise CheckpointError("\n  ".join([f"{name} is not whole:", *problems]))
    return name


def _problems(directory: Path, name: str, spoiled: Mapping[str, list[str]] | None) -> list[str]:
    if spoiled is not None and name in spoiled:
        return spoiled[name]
    return manifest.problems(directory / name, compare=spoiled is None)


def _problems_of_hint(latest: Path, names: list[str]) -> list[str]:
    if not os.path.lexists(latest):
        return []
    name = pointed_at(latest)
    if name in names:
        return []
    return [
        f"{latest} names {name}, which is not there" if name else f"{latest} names no checkpoint"
    ]


class Retention:
    """Decides which checkpoints of a directory stay. Used by rank 0 only.

    Args:
        keep: number of the newest checkpoints that verify which stay; the best one stays too.
    """

    def __init__(self, directory: Path, keep: int) -> None:
        self._directory = directory
        self._keep = keep
        self._known_problems: dict[str, list[str]] = {}
        # The best checkpoint, while the hint file `best` does not name it yet.
        self._unmarked_best: str | None = None

    def clean_up(self, name: str, best: str | None) -> None:
        """Do [7] and [8]. If the hint `best` cannot be written, the next call writes it."""
        self._unmarked_best = best or self._unmarked_best
        replace_durably(self._directory / "latest", name + "\n")
        if self._unmarked_best in saved_names(self._directory):
            replace_durably(self._directory / "best", f"{self._unmarked_best}\n")
        self._unmarked_best = None
        for name in self._expired():
            remove(self._directory / f"{name}.tmp")
            # First a rename: a kill while it is removed leaves a leftover by its name, and not a
            # corrupt checkpoint.
            os.rename(self._directory / name, self._directory / f"{name}.tmp")
        fsync_directory(self._directory)
        for entry in os.listdir(self._directory):
            if LEFTOVER_NAME.fullmatch(entry):
                remove(self._directory / entry)

    def _expired(self) -> list[str]:
        """Return names older than the newest `keep` checkpoints that verify, without the best."""
        best = pointed_at(self._directory / "best")
        names = saved_names(self._directory)
        if set(names[self._keep :]) <= {best}:  # so no checkpoint has to be read
            return []
        good = 0
        old = []
        for name in names:
            if good == self._keep:
                old.append(name)
            elif not self.problems(name):
                good += 1
        return [name for name in old if name != best]

    def problems(self, name: str) -> list[str]:
        """Return `manifest.problems`, for which each checkpoint is read only once."""
        if name not in self._known_problems:
            self.verify(name)
        return self._known_problems[name]

    def verify(self, name: str, compare: bool = True) -> list[str]:
        """Read a checkpoint, also one that was read before, and return its problems."""
        self._known_problems[name] = manifest.problems(self._directory / name, compare)
        return self._known_problems[name]


def remove(path: Path) -> None:
    """Remove a file, a link or a directory with its contents, if it exists.

    A directory may have to stay for files that other processes have open on NFS (`.nfs*`): they go
    with those processes, and the next cleanup removes it.
    """
    if path.is_dir() and not path.is_symlink():
        try:
            shutil.rmtree(path)
        except OSError:
            if any(not name.startswith(".nfs") for name in os.listdir(path)):
                raise
    else:
        path.unlink(missing_ok=True)
