"""Turns result.json into the table of README.md. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report_page import publish, quartiles, ratios, table

YARDSTICK = "by hand"
HEAD = [
    "step on one GPU",
    "time",
    "speed / by hand: median (quartiles)",
    "MFU",
    "waits in a step",
    "memory",
]


def page(result: dict[str, Any]) -> Iterator[str]:
    rows = [row for name, task in result["tasks"].items() for row in _rows(name, task)]
    yield table(HEAD, rows)
    yield f"{result['device']}; MFU is a share of {result['peak']}."


def _rows(name: str, task: dict[str, Any]) -> Iterator[list[str]]:
    for candidate, times in task["step_s"].items():
        speed = ratios(task["step_s"][YARDSTICK], times)
        mark = "**" if candidate == "Shoal" else ""
        share = task["flops"] / median(times) / task["peak_flops"]
        waits, memory = task["waits_per_step"][candidate], task["memory_bytes"][candidate]
        yield [
            f"{name}: {candidate}",
            f"{median(times) * 1e3:.2f} ms",
            "1" if candidate == YARDSTICK else quartiles(speed, ".3f", mark),
            f"{share:.1%}",
            f"{waits:.1f}",
            f"{memory / 2**30:.1f} GiB",
        ]


if __name__ == "__main__":
    publish(Path(__file__).parent, page)
