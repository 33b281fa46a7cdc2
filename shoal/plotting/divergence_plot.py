"""`shoal verify SCRIPT --plot`: the errors of a script's modules, in the order of execution."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.plotting.curves import STYLE, refuse_suffix, write_figure
from shoal.verification.script.script_report import ScriptReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette, as in shoal.plotting.curves.
COLORS = {"outputs": "#0072B2", "gradients": "#D55E00"}
LOWEST, HIGHEST = 1e-17, 10.0
"""Errors outside are drawn at the border: 0, and those that are infinite."""
MAX_LABELS = 40


def save(report: ScriptReport, output: Path) -> None:
    """Draw a report into a file. Raises ConfigError: the suffix is unknown."""
    refuse_suffix(output)
    from matplotlib import rc_context

    with rc_context(STYLE):
        write_figure(_figure(report), output)


def _figure(report: ScriptReport) -> Figure:
    from matplotlib.figure import Figure

    layers = report.layers
    figure = Figure(figsize=(8, max(3.0, 1.2 + 0.22 * min(len(layers), MAX_LABELS))))
    axes = figure.subplots()
    places = range(len(layers))
    series = {
        "outputs": [forward for _, forward, _ in layers],
        "gradients": [gradient for _, _, gradient in layers],
    }
    for name, errors in series.items():
        known = [
            (_drawn(e), place) for place, e in zip(places, errors, strict=True) if e is not None
        ]
        axes.plot(*zip(*known, strict=True) if known else ([], []), "o-", ms=4, lw=1,
                  color=COLORS[name], label=name)  # fmt: skip
    allowed = report.first.allowed if report.first is not None else None
    if allowed:
        axes.axvline(allowed, color="#555555", lw=1, ls="--", label="tolerance")
    axes.set_xscale("log")
    axes.set_xlim(LOWEST / 2, HIGHEST * 2)
    every = -(-len(layers) // MAX_LABELS) or 1
    axes.set_yticks([*places][::every], [name or "the model" for name, _, _ in layers][::every])
    axes.invert_yaxis()
    axes.set_xlabel("relative error")
    axes.legend(loc="lower right")
    first = "no difference" if report.first is None else f"first: {report.first.what}"
    axes.set_title(f"{report.verdict}; {first}")
    return figure


def _drawn(error: float) -> float:
    return min(max(error, LOWEST), HIGHEST) if math.isfinite(error) else HIGHEST
