"""Turns result.json into the table of README.md. Measures nothing."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

from benchmarks.report_page import fill, table, told

HERE = Path(__file__).parent


def main() -> None:
    result = json.loads((HERE / "result.json").read_text())
    rounds = min(len(times) for kinds in result["seconds"].values() for times in kinds.values())
    head = [
        f"seconds: median of {rounds} (min to max)",
        "ranks start again",
        "they have resumed",
        "a step is done",
    ]
    rows = [
        [
            f"{strategy}, {kind}",
            *(_spread([time[mark] for time in times]) for mark in ("started", "resumed", "step")),
        ]
        for strategy, kinds in result["seconds"].items()
        for kind, times in kinds.items()
    ]
    text = "\n\n".join([table(head, rows), told(result["circumstances"])])
    fill(HERE / "README.md", text)
    print(text)


def _spread(values: list[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
