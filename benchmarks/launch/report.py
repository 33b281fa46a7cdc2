"""Turns result.json into the tables of README.md and launch.png. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report_page import bars, publish, table

HERE = Path(__file__).parent
OURS, YARDSTICK = "shoal launch", "torchrun"
MARKS = ("all-reduce", "optimizer step")
Times = dict[str, dict[str, list[float]]]
"""Number of ranks -> launcher -> seconds of every round."""


def page(result: dict[str, Any]) -> Iterator[str]:
    for mark in MARKS:
        times_s: Times = {}
        for name, by_ranks in result["times_s"].items():
            for ranks, times in by_ranks.items():
                if times:
                    times_s.setdefault(ranks, {})[name] = [each[mark] for each in times]
        yield _table(f"seconds to the first {mark}", times_s)
    bars(
        HERE / "launch.png",
        "Seconds from the command to the first optimizer step (median, min, max)",
        "s",
        {
            f"{ranks} rank{'s' * (ranks != '1')}": {
                ("Shoal" if name == OURS else name): (min(times), median(times), max(times))
                for name, times in by_name.items()
            }
            for ranks, by_name in times_s.items()
        },
        YARDSTICK,
    )


def _table(title: str, times_s: Times) -> str:
    rounds = len(times_s["1"][OURS])
    head = [f"{title}: median of {rounds}", *(f"-n {ranks}" for ranks in times_s)]
    rows = []
    for name in times_s["1"]:
        found = [by_name.get(name) for by_name in times_s.values()]
        cells = [f"{median(times):.2f}" if times else "-" for times in found]
        rows.append([f"**{name}**" if name == OURS else name, *cells])
    shares = [median(each[OURS]) / median(each[YARDSTICK]) for each in times_s.values()]
    return table(head, [*rows, [f"{OURS} / {YARDSTICK}", *(f"{share:.2f}" for share in shares)]])


if __name__ == "__main__":
    publish(HERE, page)
