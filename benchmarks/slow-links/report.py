"""Turns result.json into the table of README.md. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report_page import publish, spread, table

from .cases import WAYS, YARDSTICK

Run = dict[str, Any]
HEAD = ["steps to it", "MB sent in 100 steps", "top1 at the end, %"]


def page(result: dict[str, Any]) -> Iterator[str]:
    setting, runs = result["setting"], result["runs"]
    target = setting["target_top1"]
    by_way = {way: {run["seed"]: run for run in runs if run["way"] == way} for way in WAYS}
    rows = [_row(way, found, by_way[YARDSTICK], target) for way, found in by_way.items() if found]
    yield (
        f"{setting['hosts']} hosts, links of {setting['rate_mbit']} Mbit/s each way; `shoal train "
        f"{setting['task']}`; {len({run['seed'] for run in runs})} seeds, the median (the least to "
        "the most)."
    )
    yield table(["way", f"seconds to {target:g} %", f"{YARDSTICK}'s / its", *HEAD], rows)


def _row(way: str, found: dict[int, Run], yardstick: dict[int, Run], target: float) -> list[str]:
    reached = {seed: hit for seed, run in found.items() if (hit := _first(run, target))}
    pairs = [(_first(yardstick[seed], target), hit) for seed, hit in reached.items()]
    missed = len(found) - len(reached)
    sent_mb = [run["sent_bytes"] / 1e4 / run["evaluations"][-1][0] for run in found.values()]
    seconds = spread([hit[1] for hit in reached.values()], ".1f")
    return [
        f"`{way}`",
        seconds + (f"; {missed} of {len(found)} never" if missed else ""),
        spread([theirs[1] / ours[1] for theirs, ours in pairs if theirs]),
        f"{median(hit[0] for hit in reached.values()):.0f}" if reached else "-",
        f"{median(sent_mb):.1f}",
        f"{median(run['evaluations'][-1][2] for run in found.values()):.2f}",
    ]


def _first(run: Run, target: float) -> tuple[int, float] | None:
    """Step and seconds of the first evaluation that reached the target."""
    return next(
        ((step, seconds) for step, seconds, top1 in run["evaluations"] if top1 >= target), None
    )


if __name__ == "__main__":
    publish(Path(__file__).parent, page)
