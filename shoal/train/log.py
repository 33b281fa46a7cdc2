"""The log of a run on rank 0: metrics, TensorBoard events, notes and the closing table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.errors import UsageError
from shoal.loggers import LoggerGroup, open_logger
from shoal.loggers.metrics_file import NAME, MetricsFile
from shoal.platform.optional_packages import missing
from shoal.train.console import print_rank_zero, print_summary, warn


class Log(LoggerGroup):
    """The records of one run: "train" of optimizer steps, and "validation" of evaluations.

    A disk that fills up later does not end training. There is one note about it, and complete
    records are left out while there is no room.

    Args:
        directory: the run directory; it is made if it does not exist.
        active: True on the rank that writes and prints; on other ranks every method does nothing.
        tensorboard: write TensorBoard events too, in directory/tensorboard.
        resume_step: records of later steps are removed; 0 for a new run.
        loggers: names of more loggers; see `shoal.loggers`.
        settings: of the run, for these.

    Raises:
        UsageError: the directory cannot be written.
    """

    def __init__(
        self,
        directory: Path,
        *,
        active: bool,
        tensorboard: bool,
        resume_step: int,
        loggers: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(self.note)
        self._active = active
        self._directory = directory
        if not active:
            return
        try:
            self.loggers.append(MetricsFile(directory, resume_step))
        except OSError as error:
            raise UsageError(
                f"{directory / NAME} cannot be written: {error.strerror}. Give another --out."
            ) from error
        if tensorboard and (sentences := missing("tensorboard")):
            self.note(f"no TensorBoard events are written: {sentences[0]}")
            tensorboard = False
        for name in dict.fromkeys([*(["tensorboard"] if tensorboard else []), *loggers]):
            try:
                self.loggers.append(open_logger(name, directory, resume_step, settings or {}))
            except OSError as error:
                self.note_loss(error, name)

    def header(self, lines: Sequence[str]) -> None:
        """Print the lines that describe the run."""
        if self._active:
            print_rank_zero("\n".join(lines))

    def note(self, text: str) -> None:
        """Print a note on stderr."""
        if self._active:
            warn(text)

    def reopen(self) -> None:
        """Write to a new metrics.jsonl from now on: the directory was removed, and made again."""
        for index, file in enumerate(self.loggers):
            if isinstance(file, MetricsFile):
                file.close()
                self.loggers[index] = MetricsFile(self._directory, 0)

    def close(self, summary: Mapping[str, Any] | None = None) -> None:
        """Close the files, and print the closing table. A run that was stopped has no summary."""
        super().close()
        if self._active and summary is not None:
            print_summary(summary)
