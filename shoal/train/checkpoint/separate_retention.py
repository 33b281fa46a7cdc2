"""Hints and pruning on one of several disks, by what is whole over all of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from shoal.platform.files import fsync_directory
from shoal.train.checkpoint.disk_contents import (
    CheckpointPart,
    WholeCheckpoint,
    expired_names,
    read_part,
)
from shoal.train.checkpoint.durable_io import replace_durably
from shoal.train.checkpoint.retention import LEFTOVER_NAME, remove
from shoal.train.checkpoint.search import pointed_at, saved_names


class SeparateRetention:
    """Steps [7] and [8] of a save on one disk. Used by the rank that acts for it.

    Args:
        keep: number of the newest whole checkpoints that stay; the best one stays too.
    """

    def __init__(self, directory: Path, keep: int) -> None:
        self._directory = directory
        self._keep = keep
        self._known: dict[str, CheckpointPart] = {}

    def parts(self) -> list[CheckpointPart]:
        """Return the parts of checkpoints that are here. Each is read and compared only once."""
        names = saved_names(self._directory)
        for name in names:
            if name not in self._known:
                self._known[name] = read_part(self._directory / name, compare=True)
        return [self._known[name] for name in names]

    def forget(self, name: str) -> None:
        """Read a checkpoint again when it is asked for next."""
        self._known.pop(name, None)

    def look(self, name: str) -> None:
        """Note what is here of a checkpoint whose files were compared a moment ago."""
        self._known[name] = read_part(self._directory / name, compare=False)

    def marked_best(self) -> str | None:
        """Return the name in the hint `best`."""
        return pointed_at(self._directory / "best")

    def clean_up(self, name: str, best: str | None, whole: Sequence[WholeCheckpoint]) -> None:
        """Write the hints, and remove what has expired and what a kill has left.

        Args:
            name: of the newest checkpoint.
            best: of a new best one.
            whole: what is whole over all disks, the newest first.
        """
        replace_durably(self._directory / "latest", name + "\n")
        names = saved_names(self._directory)
        if best in names:
            replace_durably(self._directory / "best", f"{best}\n")
        for expired in expired_names(names, whole, self._keep, self.marked_best()):
            remove(self._directory / f"{expired}.tmp")
            # First a rename, as on a shared disk: a kill leaves no checkpoint with a part missing.
            os.rename(self._directory / expired, self._directory / f"{expired}.tmp")
        fsync_directory(self._directory)
        for entry in os.listdir(self._directory):
            if LEFTOVER_NAME.fullmatch(entry):
                remove(self._directory / entry)
