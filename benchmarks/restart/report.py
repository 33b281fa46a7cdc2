"""Turns result.json into the table of README.md. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.report_page import publish, spread, table

MARKS = {"started": "ranks start again", "resumed": "they have resumed", "step": "a step is done"}


def page(result: dict[str, Any]) -> Iterator[str]:
    rows = [
        [f"{strategy}, {kind}", *(spread([time[mark] for time in times]) for mark in MARKS)]
        for strategy, kinds in result["seconds"].items()
        for kind, times in kinds.items()
    ]
    rounds = min(len(times) for kinds in result["seconds"].values() for times in kinds.values())
    yield table([f"seconds: median of {rounds} (min to max)", *MARKS.values()], rows)


if __name__ == "__main__":
    publish(Path(__file__).parent, page)
