"""Turns result.json into the tables of README.md, and the picture. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.pipeline.picture import draw
from benchmarks.report_page import publish, table

HERE = Path(__file__).parent
MICROBATCHES = (1, 4, 8, 16)
WAITING = ("stages that wait", "ranks", *(f"{m} micro-batches" for m in MICROBATCHES))
REAL = ("a GPT of eight blocks", "micro-batches", "formula", "waiting, rank by rank", "step")


def page(result: dict[str, Any]) -> Iterator[str]:
    layouts = dict.fromkeys((case["schedule"], case["ranks"]) for case in result["waiting"])
    yield table(WAITING, [waiting_row(*each, result["waiting"]) for each in layouts])
    yield table(REAL, [real_row(case) for case in result["real"]])
    draw(result["waiting"], HERE / "pipeline.png")


def waiting_row(schedule: str, ranks: int, cases: list[dict[str, Any]]) -> list[str]:
    """Return the idle share by the formula, and that of the rank that is idle for longest.

    A table that is not as short as the formula says has its own share behind it.
    """
    cells = {}
    for case in cases:
        if (case["schedule"], case["ranks"]) == (schedule, ranks):
            ideal, by_table, idle = case["formula"], max(case["table"]), max(case["idle"])
            own = "" if abs(by_table - ideal) < 1e-9 else f" (table {100 * by_table:.2f})"
            cells[case["microbatches"]] = f"{100 * ideal:.2f}{own}: {100 * idle:.2f}"
    return [f"`{schedule}`", str(ranks), *(cells.get(m, "") for m in MICROBATCHES)]


def real_row(case: dict[str, Any]) -> list[str]:
    return [
        f"`{case['schedule']}`",
        str(case["microbatches"]),
        f"{100 * case['formula']:.1f} %",
        " ".join(f"{100 * idle:.1f}" for idle in case["idle"]) + " %",
        f"{1000 * case['step_s']:.0f} ms",
    ]


if __name__ == "__main__":
    publish(HERE, page)
