"""Turns result.json into the table of README.md and memory.png. Measures nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.page import fill, table, told

HERE = Path(__file__).parent
KINDS = {
    "parameters": ("#3d405b", "parameters"),
    "gradients": ("#d1495b", "gradients"),
    "optimizer": ("#edae49", "optimizer states"),
    "peak_above_states": ("#a3a9b5", "peak above these"),
}
MIB = 2**20


def main() -> None:
    result = json.loads((HERE / "result.json").read_text())
    text = "\n\n".join([_states(result), _peaks(result), _gathered(result), told(result["circumstances"])])
    fill(HERE / "README.md", text)
    _picture(result)
    print(text)


def _states(result: dict[str, Any]) -> str:
    rows = []
    for strategy, by_ranks in result["counted"].items():
        cells = []
        for entry in by_ranks.values():
            found, expected = (sum(entry[which][k] for k in entry["expected"]) for which in ("found", "expected"))
            cells.append(f"{found / MIB:.1f} ({100 * (found / expected - 1):+.2f} %)")
        rows.append([f"`{strategy}`", *cells])
    return table(["states on a rank, MiB (against the formula)", *_ranks(result)], rows)


def _peaks(result: dict[str, Any]) -> str:
    rows = [
        [f"`{strategy}`", *(f"{entry['found']['peak_above_states'] / MIB:.1f}" for entry in by_ranks.values())]
        for strategy, by_ranks in result["counted"].items()
    ]
    return table(["peak above the states, MiB", *_ranks(result)], rows)


def _gathered(result: dict[str, Any]) -> str:
    unit, outside = (4 * result[name] / MIB for name in ("largest_unit", "outside_units"))
    return (
        f"The model: {result['parameters']:,} parameters in float32; its largest unit takes {unit:.2f} MiB when it is "
        f"gathered, what is in no unit {outside:.2f} MiB."
    )


def _ranks(result: dict[str, Any]) -> list[str]:
    return [f"{ranks} rank{'s' if ranks != '1' else ''}" for ranks in next(iter(result["counted"].values()))]


def _picture(result: dict[str, Any]) -> None:
    counted = result["counted"]
    figure = Figure(figsize=(13, 3.6), layout="constrained")
    figure.suptitle("MiB held on the fullest rank, at the peak of a step")
    panels = figure.subplots(1, len(_ranks(result)), sharex=True)
    for index, (axes, title) in enumerate(zip(panels, _ranks(result), strict=True)):
        names, left = list(counted)[::-1], [0.0] * len(counted)
        for kind, (colour, label) in KINDS.items():
            widths = [list(counted[name].values())[index]["found"][kind] / MIB for name in names]
            axes.barh(names, widths, left=left, color=colour, label=label)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.bar_label(axes.containers[-1], [f"{total:.0f}" for total in left], padding=3, fontsize=8)
        axes.set_title(title, fontsize=10)
        axes.margins(x=0.12)
        axes.spines[["top", "right"]].set_visible(False)
        if index:
            axes.set_yticklabels([])
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(HERE / "memory.png", dpi=110)


if __name__ == "__main__":
    main()
