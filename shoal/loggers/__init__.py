"""Loggers, to which the measurements of a run go; `open_logger` opens one by its name.

    logger = open_logger("wandb", directory, resume_step=0, settings={"optimizer.lr": 0.1})
    logger.write("train", {"step": 20, "loss": 2.1})       train/loss at step 20
    logger.close()

Loggers of other programs are told what their own environment variables say, such as WANDB_MODE,
MLFLOW_TRACKING_URI or TRACKIO_DIR. A run that is resumed goes on in the same record.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from shoal.errors import UsageError, did_you_mean, headline_of
from shoal.loggers.metrics_file import Record
from shoal.platform.optional_packages import missing

LOGGERS = {
    "jsonl": ("metrics_file", "MetricsFile", ""),
    "tensorboard": ("trackers", "Events", "tensorboard"),
    "wandb": ("trackers", "WandbLogger", "wandb"),
    "mlflow": ("trackers", "MlflowLogger", "mlflow"),
    "trackio": ("trackers", "TrackioLogger", "trackio"),
}
"""By name: the module, its class, and the package that it needs."""


NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a disk that is full, of a quota, and of a limit on files."""


class Logger(Protocol):
    """Writes the measurements of one run, in the order of steps."""

    def write(self, kind: str, record: Record) -> None:
        """Write the measurements of a step.

        Args:
            kind: such as "train", with which their names begin.
            record: `step`, and numbers by name.

        Raises: Exception: they are lost; the next ones may be written again.
        """

    def close(self) -> None:
        """Write what is left, and end the record."""


class LoggerGroup:
    """Several loggers of one run. What one of them loses is noted once, and ends no training.

    Attributes: loggers: in the order in which they are written.
    Args: note: prints a note.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self.loggers: list[Logger] = []
        self._note = note
        self._noted: set[str] = set()

    def write(self, kind: str, record: Record) -> None:
        """Write the measurements of a step to all of them; see `Logger.write`."""
        for logger in self.loggers:
            self._guarded(logger, partial(logger.write, kind, record))

    def close(self) -> None:
        """Close all of them."""
        for logger in self.loggers:
            self._guarded(logger, logger.close)
        self.loggers.clear()

    def note_loss(self, error: Exception, name: str) -> None:
        """Note once that records are lost.

        Args: name: of the logger that has met `error`.
        """
        text = f"{name} is losing records; training goes on: {headline_of(error)}"
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            name = "the log"  # one note for all files of a disk
            text = (
                f"{name} is losing records ({error.strerror}); training goes on. Make room on the "
                "disk."
            )
        if name not in self._noted:
            self._noted.add(name)
            self._note(text)

    def _guarded(self, logger: Logger, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - of another program, which must not end training
            self.note_loss(error, type(logger).__name__)


def open_logger(
    name: str, directory: Path, resume_step: int, settings: Mapping[str, Any]
) -> Logger:
    """Open a logger of LOGGERS. On one rank of all.

    Args:
        directory: of the run; files of the logger lie in it.
        resume_step: measurements of later steps are written again; 0 for a new run.
        settings: of the run, to be shown beside its measurements.

    Raises: UsageError: there is no such logger, or its package is not installed.
    """
    if problems := problems_of([name]):
        raise UsageError(f"loggers: {'; '.join(problems)}")
    module, kind, _ = LOGGERS[name]
    logger: Logger = getattr(import_module(f"shoal.loggers.{module}"), kind)(
        directory, resume_step, settings
    )
    return logger


def problems_of(names: list[str]) -> list[str]:
    """Return a sentence for each logger that does not exist or lacks its package."""
    found = [
        f"there is no logger '{name}'; {did_you_mean(name, LOGGERS)}"
        for name in names
        if name not in LOGGERS
    ]
    packages = [LOGGERS[name][2] for name in names if name in LOGGERS]
    return found + missing(*filter(None, packages))


def kept_id(directory: Path, name: str, new: str) -> str:
    """Return the name of a record, which is kept in the run's directory for resuming.

    Args: new: where there is none yet.
    """
    path = directory / f"{name}.id"
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(new)
    return path.read_text()
