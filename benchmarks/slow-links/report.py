"""Turns result.json into the table of README.md. Measures nothing."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report_page import fill, table, told

from .cases import WAYS, YARDSTICK

HERE = Path(__file__).parent
Run = dict[str, Any]


def main() -> None:
    result = json.loads((HERE / "result.json").read_text())
    setting, runs = result["setting"], result["runs"]
    target = setting["target_top1"]
    by_way = {way: {run["seed"]: run for run in runs if run["way"] == way} for way in WAYS}
    head = [
        "way",
        f"seconds to {target:g} %",
        f"{YARDSTICK}'s / its",
        "steps to it",
        "MB sent in 100 steps",
        "top1 at the end, %",
    ]
    rows = [_row(way, found, by_way[YARDSTICK], target) for way, found in by_way.items() if found]
    seeds = len({run["seed"] for run in runs})
    about = (
        f"{setting['hosts']} hosts, links of {setting['rate_mbit']} Mbit/s each way; `shoal train "
        f"{setting['task']}`; "
        f"{seeds} seed{'s' * (seeds > 1)}, the median (the least to the most)."
    )
    text = "\n\n".join([about, table(head, rows), told(result["circumstances"])])
    fill(HERE / "README.md", text)
    print(text)


def _row(way: str, found: dict[int, Run], yardstick: dict[int, Run], target: float) -> list[str]:
    reached = {seed: hit for seed, run in found.items() if (hit := _first(run, target)) is not None}
    shared = [
        seed
        for seed in reached
        if seed in yardstick and _first(yardstick[seed], target) is not None
    ]
    ratios = [
        (_first(yardstick[seed], target) or (0, 0.0))[1] / reached[seed][1] for seed in shared
    ]
    ends = [run["evaluations"][-1] for run in found.values()]
    missed = len(found) - len(reached)
    sent_mb = [run["sent_bytes"] / 1e4 / run["evaluations"][-1][0] for run in found.values()]
    seconds = _spread([hit[1] for hit in reached.values()], ".1f")
    return [
        f"`{way}`",
        seconds + (f"; {missed} of {len(found)} never" if missed else ""),
        _spread(ratios, ".2f"),
        f"{median(hit[0] for hit in reached.values()):.0f}" if reached else "-",
        f"{median(sent_mb):.1f}",
        f"{median(top1 for *_, top1 in ends):.2f}",
    ]


def _first(run: Run, target: float) -> tuple[int, float] | None:
    """Step and seconds of the first evaluation that reached the target."""
    return next(
        ((step, seconds) for step, seconds, top1 in run["evaluations"] if top1 >= target), None
    )


def _spread(values: list[float], form: str) -> str:
    if not values:
        return "-"
    middle = f"{median(values):{form}}"
    return (
        middle if len(values) == 1 else f"{middle} ({min(values):{form}} to {max(values):{form}})"
    )


if __name__ == "__main__":
    main()
