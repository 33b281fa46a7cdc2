"""Measurements of a script: means over ranks, written by the loggers of rank 0."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from shoal.comm.mesh import Mesh
from shoal.errors import UsageError
from shoal.loggers import LOGGERS, Logger, LoggerGroup, open_logger, problems_of
from shoal.loggers.metrics_file import NAME


class ScriptLog:
    """The loggers of a run. On other ranks than 0 it has none, and takes part in the means.

    Attributes: last: the newest means by name; empty before the first.
    """

    def __init__(self, mesh: Mesh, note: Callable[[str], None]) -> None:
        self._mesh = mesh
        self._group = LoggerGroup(note)
        self._is_open = False
        self.last: dict[str, float] = {}

    def open(
        self,
        names: Sequence[str],
        directory: str | Path | None,
        step: int | None,
        settings: dict[str, Any],
    ) -> None:
        """Open loggers. Collective.

        Raises:
            UsageError: on every rank; there is no such logger, or its package is missing; the
                directory cannot be written, or has the measurements of another run.
        """
        if problems := problems_of([*names]):
            raise UsageError(f"run.log_to: {'; '.join(problems)}")
        if not self._is_open:
            atexit.register(self._group.close)
        self._is_open = True
        failure = ""
        if self._mesh.rank == 0:
            path = new_directory() if directory is None else Path(directory)
            try:
                self._group.loggers += _opened(names, path, step, settings)
            except (OSError, UsageError) as error:
                failure = str(error)
        if failure := self._mesh.all_gather_str(failure)[0]:
            raise UsageError(f"run.log_to: {failure}")

    def write(self, values: Mapping[str, float | Tensor], step: int, kind: str) -> dict[str, float]:
        """Write the means over ranks. Collective.

        Returns: the means, on every rank.
        Raises: UsageError: no logger was opened; a value is no number.
        """
        if not self._is_open:
            known = ", ".join(LOGGERS)
            raise UsageError(
                f'run.log: say where to, before the loop: run.log_to("jsonl"); there are {known}.'
            )
        numbers = [_number(name, value) for name, value in values.items()]
        sums = self._mesh.sum_of_host_numbers(numbers)
        record = {name: s / self._mesh.size for name, s in zip(values, sums, strict=True)}
        self._group.write(kind, {"step": step, **record})
        self.last = record
        return record


def _opened(
    names: Sequence[str], path: Path, step: int | None, settings: dict[str, Any]
) -> list[Logger]:
    """Return loggers that go on behind a step; None is a new run, and refuses a record."""
    records = (NAME, "tensorboard", *(f"{logger}.id" for logger in LOGGERS))
    if step is None and (found := [name for name in records if (path / name).exists()]):
        raise UsageError(
            f"{path} has the measurements of another run ({found[0]}). Give another directory; or "
            "the step from which this run goes on, run.log_to(..., step=checkpoint.resume())."
        )
    return [open_logger(name, path, step or 0, settings) for name in dict.fromkeys(names)]


def new_directory() -> Path:
    """Return a directory in runs/, with the name of the script and the time."""
    script = Path(sys.argv[0]).stem or "python"
    return Path("runs") / f"{script}-{time.strftime('%Y%m%d-%H%M%S')}"


def _number(name: str, value: float | Tensor) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        shown = tuple(value.shape) if isinstance(value, Tensor) else repr(value)
        raise UsageError(f"run.log: {name} is no single number: {shown}.") from error
