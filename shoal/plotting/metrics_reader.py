"""The curves of a run, read from its metrics.jsonl."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.config import read
from shoal.errors import ConfigError
from shoal.train.metrics_file import NAME, read_metrics

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """One quantity over steps; `steps` and `values` of shape (points,); points that are not
    finite are left out.
    """

    steps: Floats
    values: Floats


@dataclass(frozen=True)
class RunMetrics:
    """A run by the name it has among others.

    Args: name: as short as tells it from the others. curves: by kind (train, validation) and name
        of the quantity. unreadable_lines: of its metrics.jsonl. soft_targets: what makes its
        training loss another quantity than its validation loss; empty for nothing.
    """

    name: str
    curves: dict[tuple[str, str], Curve]
    unreadable_lines: int
    soft_targets: str = ""

    @property
    def has_epochs(self) -> bool:
        """Whether there was an evaluation: they tell how long an epoch is."""
        ends = self.curves.get(("validation", "epoch"))
        return ends is not None and bool(ends.values[-1] > 0 and ends.steps[-1] > 0)

    def epochs_at(self, steps: Floats) -> Floats:
        """Epochs that were trained after so many steps; for runs that tell."""
        ends = self.curves["validation", "epoch"]
        known_steps, known_epochs = np.append(0.0, ends.steps), np.append(0.0, ends.values)
        # After the last evaluation, epochs are taken to be as long as they were on average.
        beyond = np.maximum(0.0, steps - known_steps[-1]) * known_epochs[-1] / known_steps[-1]
        return np.asarray(np.interp(steps, known_steps, known_epochs) + beyond)


def read_runs(directories: Sequence[Path]) -> list[RunMetrics]:
    """Reads run directories.

    Raises:
        ConfigError: names every directory that is no run, or has measured nothing yet.
    """
    problems = [problem for directory in directories if (problem := _not_a_run(directory))]
    if problems:
        raise ConfigError(problems)
    runs = [
        _read(directory, name)
        for directory, name in zip(directories, _names(directories), strict=True)
    ]
    empty = [directory for directory, run in zip(directories, runs, strict=True) if not run.curves]
    if empty:
        raise ConfigError(
            f"{directory / NAME}: no records yet; wait for the first logged step"
            for directory in empty
        )
    return runs


def _not_a_run(directory: Path) -> str | None:
    if not directory.exists():
        return (
            f"{directory}: there is no such directory; give the --out of a run, such as runs/digits"
        )
    if not (directory / NAME).is_file():
        return f"{directory}: not a run directory, it holds no {NAME}; give the --out of a run, such as runs/digits"
    return None


def _names(directories: Sequence[Path]) -> list[str]:
    """Of each directory as many last parts of its path as tell it from the others."""
    paths = [directory.resolve() for directory in directories]
    for length in range(1, max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            return names
    return [str(path) for path in paths]


def _read(directory: Path, name: str) -> RunMetrics:
    records, unreadable_lines = read_metrics(directory / NAME)
    curves = {
        (kind, quantity): curve
        for kind in ("train", "validation")
        for quantity, curve in _curves([record for record in records if record["kind"] == kind])
    }
    return RunMetrics(name, curves, unreadable_lines, _soft_targets(directory))


def _soft_targets(directory: Path) -> str:
    """Read it from the run's configuration; empty where that is missing or from another version."""
    try:
        return read(str(directory / "config.yaml")).job.train.soft_targets
    except ConfigError:
        return ""


def _curves(records: Sequence[dict[str, Any]]) -> Iterable[tuple[str, Curve]]:
    for quantity in sorted({name for record in records for name in record} - {"kind", "step"}):
        points = [
            (r["step"], r[quantity]) for r in records if isinstance(r.get(quantity), (int, float))
        ]
        if points:
            steps, values = np.array(points, dtype=np.float64).T
            yield quantity, Curve(steps, values)
