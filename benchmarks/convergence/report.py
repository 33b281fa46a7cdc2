"""Turns result.json into the tables of README.md. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.convergence.cases import CASES, TASKS, YARDSTICK
from benchmarks.report_page import publish, table

Runs = dict[int, dict[str, Any]]
"""Seed -> a run."""


def page(result: dict[str, Any]) -> Iterator[str]:
    less = f"less {YARDSTICK}'s"
    for name, task in TASKS.items():
        by_case: dict[str, Runs] = {case: {} for case in CASES}
        for run in result["runs"]:
            if run["task"] == name:
                by_case[run["case"]][run["seed"]] = run
        yardstick = by_case[YARDSTICK]
        head = [f"{task.title}; {len(yardstick)} seeds", "top1, %", less, "loss", less]
        rows = [_row(case, found, yardstick) for case, found in by_case.items() if found]
        yield table([*head, "steps ahead"], rows)


def _row(case: str, found: Runs, yardstick: Runs) -> list[str]:
    """Results of one way to train; differences are taken within a seed."""
    shared = sorted(found.keys() & yardstick.keys())
    strategy, *change = case.split(", ")
    cells = [", ".join([f"`{strategy}`", *change])]
    for what, digits in (("top1", 2), ("loss", 4)):
        cells.append(f"{mean(found[seed][what] for seed in shared):.{digits}f}")
        less, form = [found[n][what] - yardstick[n][what] for n in shared], f"+.{digits}f"
        means = f"{mean(less):{form}} ({min(less):{form}} to {max(less):{form}})"
        cells.append("" if case == YARDSTICK else means)
    ahead = [run["ahead_percent"] for run in found.values() if run["ahead_percent"]]
    most = max((int(steps) for percent in ahead for steps in percent), default=0)
    return [*cells, f"{mean(map(_mean_ahead, ahead)):.1f}, at most {most}" if ahead else ""]


def _mean_ahead(percent: dict[str, float]) -> float:
    return sum(int(steps) * share for steps, share in percent.items()) / sum(percent.values())


if __name__ == "__main__":
    publish(Path(__file__).parent, page)
