"""The reader of a run's metrics.jsonl: records -> one curve for each quantity."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.config import read
from shoal.errors import ConfigError
from shoal.loggers.metrics_file import NAME, read_metrics

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """One quantity over steps. Both arrays are float64, (points,)."""

    steps: Floats
    values: Floats


@dataclass(frozen=True)
class RunMetrics:
    """The metrics of one run.

    Attributes:
        name: the shortest end of its path that no other run has.
        curves: (kind, name of the quantity) -> curve; the kind is "train" or "validation".
        unreadable_lines: number of such lines in its metrics.jsonl.
        label_smoothing: of its training loss, which validation losses never have.
    """

    name: str
    curves: dict[tuple[str, str], Curve]
    unreadable_lines: int
    label_smoothing: float = 0.0

    @property
    def has_epochs(self) -> bool:
        """Return whether there was an evaluation. Evaluations tell how long an epoch is."""
        ends = self.curves.get(("validation", "epoch"))
        return ends is not None and bool(ends.values[-1] > 0 and ends.steps[-1] > 0)

    def epochs_at(self, steps: Floats) -> Floats:
        """Convert steps to epochs, both (points,); for runs that have epochs."""
        ends = self.curves["validation", "epoch"]
        known_steps = np.append(0.0, ends.steps)
        known_epochs = np.append(0.0, ends.values)
        # `interp` is constant after the last evaluation; add epochs of mean length there.
        beyond = np.maximum(0.0, steps - known_steps[-1]) * known_epochs[-1] / known_steps[-1]
        return np.asarray(np.interp(steps, known_steps, known_epochs) + beyond)


def read_runs(directories: Sequence[Path]) -> list[RunMetrics]:
    """Read run directories.

    Raises:
        ConfigError: names every directory that is no run, or that has no records yet.
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
    """Return the reason why a directory is no run; None if it is one."""
    if not directory.exists():
        return (
            f"{directory}: there is no such directory; give the --out of a run, such as runs/digits"
        )
    if not (directory / NAME).is_file():
        return (
            f"{directory}: not a run directory, it holds no {NAME}; give the --out of a run, such "
            "as runs/digits"
        )
    return None


def _names(directories: Sequence[Path]) -> list[str]:
    """Return for each directory as many last parts of its path as distinguish all of them."""
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
    return RunMetrics(name, curves, unreadable_lines, _label_smoothing(directory))


def _label_smoothing(directory: Path) -> float:
    """Read it from the run's configuration; 0 if that is missing or of another version."""
    try:
        return read(str(directory / "config.yaml")).job.train.label_smoothing
    except ConfigError:
        return 0.0


def _curves(records: Sequence[dict[str, Any]]) -> Iterable[tuple[str, Curve]]:
    """Yield (quantity, curve) for each quantity that is a number in some record."""
    for quantity in sorted({name for record in records for name in record} - {"kind", "step"}):
        points = [
            (r["step"], r[quantity]) for r in records if isinstance(r.get(quantity), (int, float))
        ]
        if points:
            steps, values = np.array(points, dtype=np.float64).T
            yield quantity, Curve(steps, values)
