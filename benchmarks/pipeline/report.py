"""Turns result.json into the tables of README.md, and the picture. Measures nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.pipeline.picture import draw
from benchmarks.report_page import fill, table, told

HERE = Path(__file__).parent
WAITING = ("stages that wait", "ranks", "micro-batches", "formula", "measured", "ratio", "held")
REAL = ("a GPT of eight blocks", "micro-batches", "formula", "waiting, rank by rank", "step")


def main() -> None:
    result = json.loads((HERE / "result.json").read_text())
    tables = [table(WAITING, [waiting_row(case) for case in result["waiting"]])]
    if result["real"]:
        tables.append(table(REAL, [real_row(case) for case in result["real"]]))
    text = "\n\n".join([*tables, told(result["circumstances"])])
    fill(HERE / "README.md", text)
    draw(result["waiting"], HERE / "pipeline.png")
    print(text)


def waiting_row(case: dict[str, Any]) -> list[str]:
    """One case; a table that is not as short as the formula says has its own share beside it.

    So has a rank that holds other activations than those of its table.
    """
    ideal, by_table = case["formula"], max(case["table"])
    low, high = min(case["idle"]), max(case["idle"])
    held, in_flight = " ".join(map(str, case["held"])), " ".join(map(str, case["in_flight"]))
    return [
        f"`{case['schedule']}`",
        str(case["ranks"]),
        str(case["microbatches"]),
        f"{100 * ideal:.2f} %"
        + ("" if abs(by_table - ideal) < 1e-9 else f", table {100 * by_table:.2f} %"),
        f"{100 * low:.2f} to {100 * high:.2f} %",
        f"{high / ideal:.3f}",
        held if held == in_flight else f"{held}, table {in_flight}",
    ]


def real_row(case: dict[str, Any]) -> list[str]:
    return [
        f"`{case['schedule']}`",
        str(case["microbatches"]),
        f"{100 * case['formula']:.1f} %",
        " ".join(f"{100 * idle:.1f}" for idle in case["idle"]) + " %",
        f"{1000 * case['step_s']:.0f} ms",
    ]


if __name__ == "__main__":
    main()
