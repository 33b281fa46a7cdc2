"""Hints and pruning after a save: `latest`, `best`, and the checkpoints that stay.

newest first    step-9   step-8   step-7   step-6   step-5
keep=2          stays    corrupt  stays    pruned   stays: the best one
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from shoal.checkpoint import manifest
from shoal.checkpoint.durable_io import replace_durably
from shoal.checkpoint.search import pointed_at, saved_names
from shoal.platform.files import fsync_directory

LEFTOVER_NAME = re.compile(r"(step-\d{8,}|latest|best)\.tmp")


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
