"""Turns result.json into the tables of README.md and docs/strategies/lean.md, and memory.png.
Measures nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.memory.picture import draw
from benchmarks.report_page import fill, table, told

HERE = Path(__file__).parent
LEAN = HERE.parents[1] / "docs" / "strategies" / "lean.md"
MIB = 2**20
DASH = "–"


def main() -> None:
    result = json.loads((HERE / "result.json").read_text())
    circumstances = told(result["circumstances"])
    parts = [
        _states(result),
        _exactness(result),
        _gathered(result),
        circumstances,
    ]
    fill(HERE / "README.md", "\n\n".join(parts))
    fill(LEAN, f"{_lean(result)}\n\nMiB on the fullest rank. {circumstances}")
    draw(result["cases"], HERE / "memory.png")
    print("\n\n".join(parts))


def _states(result: dict[str, Any]) -> str:
    def cell(entry: dict[str, Any]) -> str:
        found = sum(entry["found"][kind] for kind in entry["expected"])
        return f"{found / MIB:.1f}, {entry['found']['peak'] / MIB:.1f}"

    return _by_ranks("states on a rank, peak of a step, MiB", result, cell)


def _exactness(result: dict[str, Any]) -> str:
    """The worst distance of each kind of state from its formula, over all cases."""
    entries = list(_entries(result))
    worst = {
        kind: max((_relative(e["found"][kind], e["expected"][kind]) for e in entries), key=abs)
        for kind in entries[0]["expected"]
    }
    told_apart = ", ".join(f"{kind} {100 * value:+.2f} %" for kind, value in worst.items())
    return f"The furthest from the formula in any cell, each kind by itself: {told_apart}."


def _gathered(result: dict[str, Any]) -> str:
    unit, outside = (4 * result[name] / MIB for name in ("largest_unit", "outside_units"))
    return (
        f"The model: {result['parameters']:,} parameters in float32; its largest unit takes "
        f"{unit:.2f} MiB when it is "
        f"gathered, what is in no unit {outside:.2f} MiB. {DASH}: refused."
    )


def _lean(result: dict[str, Any]) -> str:
    """ddp on one rank and zero3 on eight, with each optimizer."""
    chosen = {"ddp": "1", "zero3": "8"}
    rows = [
        _lean_row(case, chosen[case["strategy"]], result["parameters"])
        for case in sorted(result["cases"], key=lambda case: case["strategy"])
        if case["strategy"] in chosen and "found" in case["ranks"][chosen[case["strategy"]]]
    ]
    head = [
        "on one rank",
        "parameters",
        "gradients",
        "optimizer state",
        "sum",
        "state per parameter",
        "peak of a step",
    ]
    return table(head, rows)


def _lean_row(case: dict[str, Any], ranks: str, parameters: int) -> list[str]:
    found = case["ranks"][ranks]["found"]
    held = [found[kind] for kind in ("parameters", "gradients", "optimizer")]
    label = case["label"].replace(case["strategy"], f"{case['strategy']} of {ranks}", 1)
    shards = int(ranks) if "zero" in case["strategy"] else 1
    each = f"{found['optimizer'] * shards / parameters:.2f} bytes"
    return [
        label,
        *(f"{size / MIB:.1f}" for size in (*held, sum(held))),
        each,
        f"{found['peak'] / MIB:.1f}",
    ]


def _by_ranks(head: str, result: dict[str, Any], cell: Any) -> str:
    """A row for each case, a column for each number of ranks."""
    rows = [
        [
            f"`{case['label']}`",
            *(cell(entry) if "found" in entry else DASH for entry in case["ranks"].values()),
        ]
        for case in result["cases"]
    ]
    ranks = [f"{ranks} rank{'s' if ranks != '1' else ''}" for ranks in result["cases"][0]["ranks"]]
    return table([head, *ranks], rows)


def _entries(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Results of all cases on all ranks that were not refused."""
    return (
        entry for case in result["cases"] for entry in case["ranks"].values() if "found" in entry
    )


def _relative(found: int, expected: int) -> float:
    return found / expected - 1


if __name__ == "__main__":
    main()
