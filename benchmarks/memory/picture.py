"""Draws what each rank holds: a bar for each case, a panel for each number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

KINDS = {
    "parameters": ("#3d405b", "parameters"),
    "gradients": ("#d1495b", "gradients"),
    "optimizer": ("#edae49", "optimizer states"),
    "beside": ("#a3a9b5", "beside them: activations, gathered units, ..."),
}
OFFLOADED = {"alpha": 0.35, "hatch": "////", "edgecolor": "white", "linewidth": 0}
MIB = 2**20


def draw(cases: list[dict[str, Any]], picture: Path) -> None:
    """Writes `picture`. Each kind is drawn at its own most; the number is the most at once."""
    ranks = list(cases[0]["ranks"])
    figure = Figure(figsize=(15, 6.2), layout="constrained")
    figure.suptitle(
        "MiB on the fullest rank: each kind at its most; the number is the most held at once on "
        "the device"
    )
    for axes, number in zip(
        figure.subplots(1, len(ranks), sharex=True, sharey=True), ranks, strict=True
    ):
        for row, case in enumerate(cases):
            _bar(axes, row, case["ranks"][number], case["offloaded"])
        axes.set_title(f"{number} rank{'s' if number != '1' else ''}", fontsize=10)
        axes.set_yticks(range(len(cases)), [case["label"] for case in cases])
        axes.set_ylim(len(cases) - 0.4, -0.6)
        axes.set_xlim(0, _longest(cases) * 1.15)
        axes.spines[["top", "right"]].set_visible(False)
    patches = [Patch(facecolor=colour, label=label) for colour, label in KINDS.values()]
    hatched: dict[str, Any] = OFFLOADED
    patches.append(Patch(facecolor="#3d405b", label="in host memory", **hatched))
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
    figure.savefig(picture, dpi=110)


def _bar(axes: Axes, row: int, entry: dict[str, Any], offloaded: bool) -> None:
    if "found" not in entry:
        axes.text(2, row, "refused", va="center", fontsize=8, color="#6b7280", style="italic")
        return
    left = 0.0
    for kind, (colour, _) in KINDS.items():
        width = entry["found"][kind] / MIB
        look: dict[str, Any] = OFFLOADED if offloaded and kind != "beside" else {}
        axes.barh(row, width, left=left, color=colour, **look)
        left += width
    axes.text(left + 3, row, f"{entry['found']['peak'] / MIB:.0f}", va="center", fontsize=8)


def _longest(cases: list[dict[str, Any]]) -> float:
    found = [
        entry["found"] for case in cases for entry in case["ranks"].values() if "found" in entry
    ]
    return float(max(sum(kinds[kind] for kind in KINDS) for kinds in found)) / MIB
