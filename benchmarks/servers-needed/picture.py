"""The picture: a step's time over the number of servers, measured and by closed form, and the
ring's beside it.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .fit import Point

COLOURS = ("#3d405b", "#2a9d8f", "#e9a03b", "#d1495b")


def draw(path: Path, found: list[Point]) -> None:
    """Write the picture."""
    figure = Figure(figsize=(10.5, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    bare = [point for point in found if point.compute_s == 0]
    for colour, workers in zip(COLOURS, sorted({point.workers for point in bare}), strict=False):
        mine = [point for point in bare if point.workers == workers]
        _curve(left, mine, f"{workers} worker{'s' * (workers > 1)}", colour)
    left.set_title("a step that only exchanges", fontsize=10)
    beside = [point for point in found if point.compute_s > 0]
    for colour, compute_s in zip(
        COLOURS[1::2], sorted({point.compute_s for point in beside}), strict=False
    ):
        mine = [point for point in beside if point.compute_s == compute_s]
        _curve(right, mine, f"{compute_s:g} s of compute", colour)
    right.set_title("a step of 4 workers that computes meanwhile", fontsize=10)
    for axes in (left, right):
        axes.plot([], [], color="grey", label="closed form, with η")
        axes.plot([], [], color="grey", linestyle=":", label="Gloo's ring, same colour")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("servers")
        axes.set_ylabel("seconds a step")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def _curve(axes: Axes, mine: list[Point], name: str, colour: str) -> None:
    servers = [point for point in mine if point.by == "servers"]
    counts = [point.servers for point in servers]
    middle = [point.step_s for point in servers]
    spread = [[p.step_s - p.low_s for p in servers], [p.high_s - p.step_s for p in servers]]
    axes.errorbar(counts, middle, yerr=spread, fmt="o", color=colour, capsize=3, label=name)
    axes.plot(counts, [point.closed_s for point in servers], color=colour, linewidth=1)
    axes.set_xticks(counts)
    for point in mine:
        if point.by == "ring":
            axes.axhline(point.step_s, color=colour, linestyle=":", linewidth=1)
