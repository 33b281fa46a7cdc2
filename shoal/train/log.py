"""The log of a run on rank 0: metrics, TensorBoard events, notes and the closing table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from shoal.errors import UsageError, headline_of
from shoal.loggers import Logger, open_logger
from shoal.loggers.metrics_file import NAME, MetricsFile, Record
from shoal.platform.optional_packages import missing
from shoal.train.console import print_rank_zero, print_summary, warn


class Log:
    """The records of one run: metrics.jsonl (see metrics_file.py) and TensorBoard events.

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
        self._active = active
        self._directory = directory
        self._files: list[Logger] = []
        self._lost: set[str] = set()
        self._noted_full_disk = False
        if not active:
            return
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._files.append(MetricsFile(directory / NAME, resume_step))
        except OSError as error:
            raise UsageError(
                f"{directory / NAME} cannot be written: {error.strerror}. Give another --out."
            ) from error
        if tensorboard:
            self._open_events(directory, resume_step)
        for name in loggers:
            self._files.append(open_logger(name, directory, resume_step, settings or {}))

    def header(self, lines: Sequence[str]) -> None:
        """Print the lines that describe the run."""
        if self._active:
            print_rank_zero("\n".join(lines))

    def step(self, record: Record) -> None:
        """Write the record of an optimizer step, in the order of steps. It has `step` at least."""
        self._write("train", record)

    def evaluation(self, record: Record) -> None:
        """Write the record of the evaluation after step `record["step"]`."""
        self._write("validation", record)

    def note(self, text: str) -> None:
        """Print a note on stderr."""
        if self._active:
            warn(text)

    def reopen(self) -> None:
        """Write to a new metrics.jsonl from now on: the directory was removed, and made again."""
        for index, file in enumerate(self._files):
            if isinstance(file, MetricsFile):
                file.close()
                self._files[index] = MetricsFile(self._directory / NAME, 0)

    def close(self, summary: Mapping[str, Any] | None = None) -> None:
        """Close the files, and print the closing table. A run that was stopped has no summary."""
        for file in self._files:
            self._guarded(file, file.close)
        self._files.clear()
        if self._active and summary is not None:
            print_summary(summary)

    def _open_events(self, directory: Path, resume_step: int) -> None:
        try:
            from shoal.loggers.tensorboard_events import Events

            self._files.append(Events(directory, resume_step))
        except ImportError:
            (sentence,) = missing("tensorboard") or ["tensorboard cannot be imported"]
            self.note(f"no TensorBoard events are written: {sentence}")
        except OSError as error:
            self._note_full_disk(error)

    def _write(self, kind: str, record: Record) -> None:
        for file in self._files:
            self._guarded(file, partial(file.write, kind, record))

    def _guarded(self, logger: Logger, call: Callable[[], None]) -> None:
        """Call a method of a logger; note its error, once for each kind of logger."""
        try:
            call()
        except OSError as error:
            self._note_full_disk(error)
        except Exception as error:  # noqa: BLE001 - of another program, which must not end training
            name = type(logger).__name__
            if name not in self._lost:
                self._lost.add(name)
                self.note(f"{name} is losing records; training goes on: {headline_of(error)}")

    def _note_full_disk(self, error: OSError) -> None:
        if not self._noted_full_disk:
            self._noted_full_disk = True
            self.note(
                f"the log is losing records ({error.strerror}); training goes on. Make room on the "
                "disk."
            )
