"""Measurements of a script: means over ranks, written by the loggers of rank 0."""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from shoal.comm.mesh import Mesh
from shoal.errors import UsageError
from shoal.loggers import LOGGERS, Logger, open_logger, problems_of


class ScriptLog:
    """The loggers of a run. On other ranks than 0 it has none, and takes part in the means."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._loggers: list[Logger] = []
        self._names: list[str] = []

    def open(self, names: list[str], directory: str | Path, settings: Mapping[str, Any]) -> None:
        """Open loggers. Collective.

        Raises: UsageError: on every rank; there is no such logger, or its package is missing.
        """
        if problems := problems_of(names):
            raise UsageError(f"run.log_to: {'; '.join(problems)}")
        self._names += names
        if self._mesh.rank == 0:
            opened = [open_logger(name, Path(directory), 0, settings) for name in names]
            self._loggers += opened
            for logger in opened:
                atexit.register(logger.close)

    def write(self, values: Mapping[str, float | Tensor], step: int, kind: str) -> dict[str, float]:
        """Write the means over ranks. Collective.

        Returns: the means, on every rank.
        Raises: UsageError: no logger was opened; a value is no number.
        """
        if not self._names:
            known = ", ".join(LOGGERS)
            raise UsageError(
                f'run.log: say where to, before the loop: run.log_to("jsonl"); there are {known}.'
            )
        numbers = [_number(name, value) for name, value in values.items()]
        sums = self._mesh.sum_of_host_numbers(numbers)
        record = {name: s / self._mesh.size for name, s in zip(values, sums, strict=True)}
        for logger in self._loggers:
            logger.write(kind, {"step": step, **record})
        return record


def _number(name: str, value: float | Tensor) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        shown = tuple(value.shape) if isinstance(value, Tensor) else repr(value)
        raise UsageError(f"run.log: {name} is no single number: {shown}.") from error
