"""Turns result.json into the tables of README.md. Measures nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.convergence.cases import CASES, TASKS, YARDSTICK
from benchmarks.report_page import fill, table, told

HERE = Path(__file__).parent
Run = dict[str, Any]


def main() -> None:
    result = json.loads((HERE / "result.json").read_text())
    parts = [
        task_table(name, [run for run in result["runs"] if run["task"] == name]) for name in TASKS
    ]
    text = "\n\n".join([*parts, told(result["circumstances"])])
    fill(HERE / "README.md", text)
    print(text)


def task_table(name: str, runs: Sequence[Run]) -> str:
    """One row a way to train; differences are taken within a seed, over the seeds that both
    have.
    """
    by_case = {case: {run["seed"]: run for run in runs if run["case"] == case} for case in CASES}
    yardstick = by_case[YARDSTICK]
    title = f"{TASKS[name].title}; {len(yardstick)} seeds"
    head = [
        title,
        "top1, %",
        f"less {YARDSTICK}'s",
        "loss",
        f"less {YARDSTICK}'s",
        "steps ahead",
    ]
    return table(head, [row(case, found, yardstick) for case, found in by_case.items() if found])


def row(case: str, found: dict[int, Run], yardstick: dict[int, Run]) -> list[str]:
    """Results of one way to train."""
    shared = sorted(found.keys() & yardstick.keys())
    strategy, *change = case.split(", ")
    cells = [", ".join([f"`{strategy}`", *change])]
    for what, digits in (("top1", 2), ("loss", 4)):
        cells.append(f"{mean(found[seed][what] for seed in shared):.{digits}f}")
        differences = [found[seed][what] - yardstick[seed][what] for seed in shared]
        cells.append("" if case == YARDSTICK else spread(differences, f"+.{digits}f"))
    ahead = [_mean_ahead(run["ahead_percent"]) for run in found.values() if run["ahead_percent"]]
    most = max((int(steps) for run in found.values() for steps in run["ahead_percent"]), default=0)
    cells.append(f"{mean(ahead):.1f}, at most {most}" if ahead else "")
    return cells


def spread(values: list[float], form: str) -> str:
    """The mean, and from where to where."""
    return f"{mean(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def _mean_ahead(percent: dict[str, float]) -> float:
    return sum(int(steps) * share for steps, share in percent.items()) / sum(percent.values())


if __name__ == "__main__":
    main()
