"""Turns result.json into the tables of README.md and docs/strategies/lean.md, and memory.png.
Measures nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.memory.picture import draw
from benchmarks.report_page import fill, publish, table, told

HERE = Path(__file__).parent
LEAN = HERE.parents[1] / "docs" / "strategies" / "lean.md"
MIB = 2**20
DASH = "–"
LEAN_HEAD = ["on one rank", "parameters", "gradients", "optimizer state", "sum"]


def page(result: dict[str, Any]) -> Iterator[str]:
    yield _by_ranks(result)
    yield _exactness(result)
    unit, outside = (4 * result[name] / MIB for name in ("largest_unit", "outside_units"))
    yield (
        f"The model: {result['parameters']:,} parameters in float32; its largest unit takes "
        f"{unit:.2f} MiB when it is gathered, what is in no unit {outside:.2f} MiB. {DASH}: "
        "refused."
    )
    fill(LEAN, f"{_lean(result)}\n\nMiB on the fullest rank. {told(result['circumstances'])}")
    draw(result["cases"], HERE / "memory.png")


def _by_ranks(result: dict[str, Any]) -> str:
    """A row for each case, a column for each number of ranks."""
    rows = [[f"`{case['label']}`", *map(_cell, case["ranks"].values())] for case in result["cases"]]
    ranks = [f"{ranks} rank{'s' * (ranks != '1')}" for ranks in result["cases"][0]["ranks"]]
    return table(["states on a rank, peak of a step, MiB", *ranks], rows)


def _cell(entry: dict[str, Any]) -> str:
    if "found" not in entry:
        return DASH
    found = sum(entry["found"][kind] for kind in entry["expected"])
    return f"{found / MIB:.1f}, {entry['found']['peak'] / MIB:.1f}"


def _exactness(result: dict[str, Any]) -> str:
    """The worst distance of each kind of state from its formula, over all cases."""
    cells = [entry for case in result["cases"] for entry in case["ranks"].values()]
    entries = [entry for entry in cells if "found" in entry]
    worst = {
        kind: max((e["found"][kind] / e["expected"][kind] - 1 for e in entries), key=abs)
        for kind in entries[0]["expected"]
    }
    apart = ", ".join(f"{kind} {100 * value:+.2f} %" for kind, value in worst.items())
    return f"The furthest from the formula in any cell, each kind by itself: {apart}."


def _lean(result: dict[str, Any]) -> str:
    """ddp on one rank and zero3 on eight, with each optimizer."""
    chosen = {"ddp": "1", "zero3": "8"}
    rows = [
        _lean_row(case, chosen[case["strategy"]], result["parameters"])
        for case in sorted(result["cases"], key=lambda case: case["strategy"])
        if case["strategy"] in chosen and "found" in case["ranks"][chosen[case["strategy"]]]
    ]
    return table([*LEAN_HEAD, "state per parameter", "peak of a step"], rows)


def _lean_row(case: dict[str, Any], ranks: str, parameters: int) -> list[str]:
    found = case["ranks"][ranks]["found"]
    held = [found[kind] for kind in ("parameters", "gradients", "optimizer")]
    label = case["label"].replace(case["strategy"], f"{case['strategy']} of {ranks}", 1)
    shards = int(ranks) if "zero" in case["strategy"] else 1
    each = f"{found['optimizer'] * shards / parameters:.2f} bytes"
    sizes = [f"{size / MIB:.1f}" for size in (*held, sum(held))]
    return [label, *sizes, each, f"{found['peak'] / MIB:.1f}"]


if __name__ == "__main__":
    publish(HERE, page)
