"""Draws the idle share of every schedule over the number of micro-batches: lines by the
formula, points as measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

COLOURS = {
    "gpipe": "#a3a9b5",
    "1f1b": "#3d405b",
    "interleaved": "#edae49",
    "zero-bubble": "#d1495b",
    "zbv": "#00798c",
}


def draw(cases: list[dict[str, Any]], picture: Path) -> None:
    """Writes `picture`; a panel for each number of ranks, both axes logarithmic."""
    all_ranks = sorted({case["ranks"] for case in cases})
    figure = Figure(figsize=(4.6 * len(all_ranks), 3.8), layout="constrained")
    figure.suptitle(
        "Idle share of a step: lines by the formula, points as measured, one for each rank"
    )
    panels = figure.subplots(1, len(all_ranks), sharey=True, squeeze=False)[0]
    for axes, ranks in zip(panels, all_ranks, strict=True):
        for name, colour in COLOURS.items():
            mine = [case for case in cases if (case["schedule"], case["ranks"]) == (name, ranks)]
            numbers = [case["microbatches"] for case in mine]
            # Where the formula is not meant for so few micro-batches, the table says more than it.
            ideal = [100 * max(case["formula"], *case["table"]) for case in mine]
            label = "gpipe, the same as 1f1b" if name == "gpipe" else name
            axes.plot(numbers, ideal, color=colour, linewidth=1, label=label)
            points = [(case["microbatches"], 100 * idle) for case in mine for idle in case["idle"]]
            axes.scatter(*zip(*points, strict=True), color=colour, s=14, zorder=3)
        axes.set(xscale="log", yscale="log", xlabel="micro-batches", title=f"{ranks} ranks")
        axes.set_xticks([4, 8, 16], ["4", "8", "16"])
        axes.set_xticks([], minor=True)
        axes.set_yticks([1, 2, 5, 10, 20, 40], ["1 %", "2 %", "5 %", "10 %", "20 %", "40 %"])
        axes.set_yticks([], minor=True)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].legend(frameon=False, fontsize=8)
    figure.savefig(picture, dpi=110)
