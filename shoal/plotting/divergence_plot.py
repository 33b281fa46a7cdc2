"""`shoal verify SCRIPT --plot`: the errors of a script's modules, in the order of execution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.plotting.curves import STYLE, check_can_draw, write_figure
from shoal.verification.script.script_report import ScriptReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, as in shoal.plotting.curves.
COLORS = {"outputs": "#0072B2", "gradients": "#D55E00"}
MARKERS = {"outputs": "o", "gradients": "s"}
LOWEST, HIGHEST = 1e-18, 10.0
"""Errors outside are drawn at the border: 0, and those that are infinite."""
MAX_LABELS = 40


def save(report: ScriptReport, output: Path) -> None:
    """Draw a report into a file. Raises ConfigError: the suffix is unknown."""
    check_can_draw(output)
    from matplotlib import rc_context

    with rc_context(STYLE):
        write_figure(_figure(report), output)


def _figure(report: ScriptReport) -> Figure:
    from matplotlib.figure import Figure

    layers = report.layers
    height = 1.8 + 0.24 * max(4, min(len(layers), MAX_LABELS))
    figure = Figure(figsize=(8, height), layout="constrained")
    axes = figure.subplots()
    for name, errors in _series(report).items():
        drawn = [_drawn(error) for error in errors.values()]
        style: dict[str, Any] = {"color": COLORS[name], "alpha": 0.85, "clip_on": False}
        axes.plot(drawn, [*errors], MARKERS[name], ms=5, label=name, **style)
    names = [name for name, _, _ in layers]
    place = _mark_first(axes, report, names)
    every = -(-len(layers) // MAX_LABELS) or 1
    shown = sorted({*range(0, len(names), every), *([] if place is None else [place])})
    axes.set_yticks(shown, [names[i] or "the model" for i in shown])
    axes.set_ylim(len(layers) - 0.5, -0.5)
    _scale_errors(axes)
    figure.legend(loc="outside lower center", ncols=4)
    figure.suptitle(_title(report), x=0.01, ha="left")
    return figure


def _mark_first(axes: Axes, report: ScriptReport, names: Sequence[str]) -> int | None:
    """Mark the first difference and its tolerance; return its place among the layers, if any."""
    first = report.first
    if first is None:
        return None
    if first.allowed:
        axes.axvline(first.allowed, color="#555555", lw=1, ls="--", label="tolerance of the first")
    if first.module not in names:
        return None
    place = names.index(first.module)
    axes.axhspan(place - 0.5, place + 0.5, color="#F0E442", alpha=0.4, lw=0, label="the first")
    return place


def _scale_errors(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.set_xlim(LOWEST, HIGHEST)
    powers = range(-16, 1, 2)
    axes.set_xticks(
        [LOWEST, *(10.0**p for p in powers), HIGHEST],
        ["0", *(f"$10^{{{p}}}$" if p else "1" for p in powers), "more"],
    )
    axes.minorticks_off()
    axes.set_xlabel("relative error to one process; gradients: of a module's own parameters")


def _series(report: ScriptReport) -> dict[str, dict[int, float]]:
    """Return the known errors by the places of their modules."""
    both = {
        "outputs": [forward for _, forward, _ in report.layers],
        "gradients": [gradient for _, _, gradient in report.layers],
    }
    return {
        name: {place: error for place, error in enumerate(errors) if error is not None}
        for name, errors in both.items()
    }


def _title(report: ScriptReport) -> str:
    if report.first is None:
        return f"{report.verdict}: {report.steps} steps on {report.ranks} ranks, and alone"
    line = f"\nat {report.first.line}" if report.first.line else ""
    return f"{report.verdict}: {report.cause.kind}\nfirst: {report.first.what}{line}"


def _drawn(error: float) -> float:
    return min(max(error, LOWEST), HIGHEST) if math.isfinite(error) else HIGHEST
