"""Logs of ranks on several hosts: one file a rank, on the machine of the command."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from shoal.errors import UsageError
from shoal.platform.ownership import open_own


class RankLogs:
    """Appends what each rank prints to `DIRECTORY/rank-N.log`, stdout and stderr as they come.

    The directory may be one that other users can write: nothing is written through a link, into a
    pipe, or into another user's file.

    Args:
        directory: made where it does not exist.

    Raises:
        UsageError: nothing can be written there.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[int, int] = {}
        self._has_failed = False
        try:
            directory.mkdir(parents=True, exist_ok=True)
            os.close(self._open(0))
        except OSError as error:
            raise UsageError(
                f"--log-dir {directory}: no log can be written there: {error.strerror}. "
                "Choose a directory of yours"
            ) from error

    def write(self, rank: int, text: str) -> None:
        """Append text of a rank. After an error, such as a full disk, nothing is written."""
        if self._has_failed:
            return
        try:
            if rank not in self._files:
                self._files[rank] = self._open(rank)
            data = memoryview(text.encode(errors="backslashreplace"))
            while data:
                data = data[os.write(self._files[rank], data) :]
        except OSError as error:
            self._has_failed = True
            print(
                f"note: no more logs are written in {self._directory}: {error.strerror}",
                file=sys.stderr,
                flush=True,
            )

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _open(self, rank: int) -> int:
        path = self._directory / f"rank-{rank}.log"
        return open_own(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
