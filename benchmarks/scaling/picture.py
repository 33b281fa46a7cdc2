"""The picture: efficiency over the number of hosts, measured as points, by closed form as lines."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.report_page import OURS, YARDSTICK

from .fit import Point

COLOURS = {
    "ring": OURS,
    "tree": "#e9a03b",
    "one server": YARDSTICK,
    "as many servers as workers": "#7b8fb2",
    "ring, 2 ranks a host": OURS,
    "hierarchical, 2 ranks a host": "#8d5fa8",
}


def draw(path: Path, found: list[Point]) -> None:
    """Write the picture: one rank a host on the left, two on the right."""
    figure = Figure(figsize=(10.5, 4.2), layout="constrained")
    for axes, each in zip(figure.subplots(1, 2, sharey=True), (1, 2), strict=True):
        for name in dict.fromkeys(point.name for point in found if point.ranks_per_host == each):
            mine = [point for point in found if point.name == name]
            hosts, middle = [p.hosts for p in mine], [p.efficiency for p in mine]
            spread = [[p.efficiency - p.low for p in mine], [p.high - p.efficiency for p in mine]]
            axes.errorbar(
                hosts, middle, yerr=spread, fmt="o", color=COLOURS[name], capsize=3, label=name
            )
            axes.plot(hosts, [p.closed for p in mine], color=COLOURS[name], linewidth=1)
            axes.set_xticks(sorted({p.hosts for p in found}))
        axes.plot([], [], color="grey", linewidth=1, label="closed form")
        axes.set_title(f"{each} rank{'s' * (each > 1)} on each host", fontsize=10)
        axes.set_xlabel("hosts that compute")
        axes.set_ylim(0, 1.05)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8)
    figure.axes[0].set_ylabel("efficiency: 1 is linear")
    figure.savefig(path, dpi=110)
