"""Turns the records into the tables of README.md and overhead.png. Measures nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.overhead.checks import rows_of
from benchmarks.report_page import bars, fill, quartiles, ratios, table, told

HERE = Path(__file__).parent
YARDSTICK = "hand-written DDP"
BY_HAND = "by hand over Gloo"
Record = dict[str, Any]


def main() -> None:
    records = [
        json.loads((HERE / f"{name}.json").read_text()) for name in ("result", "backends", "checks")
    ]
    parts = [*of_libraries(records[0]), *over_backends(records[1]), *of_checks(records[2])]
    fill(HERE / "README.md", "\n\n".join(parts))
    print("\n\n".join(parts))


def of_libraries(result: Record) -> Iterator[str]:
    """The ratio of each candidate's step to the yardstick's in the same round."""
    tasks = {
        name: {
            candidate: ratios(times_s, task["step_s"][YARDSTICK])
            for candidate, times_s in task["step_s"].items()
        }
        for name, task in result["tasks"].items()
    }
    rows = []
    for name in next(iter(tasks.values())):
        if name == YARDSTICK:
            steps = [task["step_s"][name] for task in result["tasks"].values()]
            cells = [f"1 = {median(times_s) * 1e3:.2f} ms" for times_s in steps]
        else:
            cells = [quartiles(found[name]) for found in tasks.values()]
        rows.append([f"**{name}**" if name == "Shoal" else name, *cells])
    rounds = [f"{name}, {task['rounds']} rounds" for name, task in result["tasks"].items()]
    yield table(["ratio of step times: median (quartiles)", *rounds], rows)
    furthest = max(result["difference_after_one_epoch"].values())
    yield (
        "Same work: after one unshuffled epoch of the MLP, no candidate's parameters are further "
        f"from the hand-written loop's than {furthest:.1e} of the way "
        "that training has moved them."
    )
    yield told(result["circumstances"])
    title = "Time of a step on two CPU processes, hand-written loop = 1 (median, quartiles)"
    groups = {
        task: {name: tuple(quantiles(values)) for name, values in found.items()}
        for task, found in tasks.items()
    }
    bars(HERE / "overhead.png", title, "ratio", groups, YARDSTICK)


def over_backends(result: Record) -> Iterator[str]:
    """Ratios to the hand-written step over Gloo, which each of both runs has."""
    columns = [
        (run, name)
        for run, found in result.items()
        for name in next(iter(found["step_s"].values()))
        if name != BY_HAND
    ]
    rows = []
    for task in result["shoal"]["step_s"]:
        cells = []
        for run, name in columns:
            steps = result[run]["step_s"].get(task, {})
            cells.append(quartiles(ratios(steps[name], steps[BY_HAND])) if name in steps else "")
        rows.append([task, *cells])
    head = "step / the hand-written one over Gloo: median (quartiles)"
    yield table([head, *(name for _, name in columns)], rows)
    others = "by hand over shoal", "no exchange"
    rows = []
    for task, steps in result["shoal"]["step_s"].items():
        found = [ratios(steps["Shoal over shoal"], steps[n]) for n in others if n in steps]
        rows.append([task, *map(quartiles, found), *[""] * (len(others) - len(found))])
    yield table(["Shoal over shoal / the same round's", *others], rows)
    yield told(result["shoal"]["circumstances"])


def of_checks(result: Record) -> Iterator[str]:
    columns = {name: rows_of(found) for name, found in result["found"].items()}
    names = next(iter(columns.values()))
    rows = [[name, *(column[name] for column in columns.values())] for name in names]
    yield table(
        ["share of a step: of fastest tenths; median of rounds (its spread)", *columns], rows
    )
    yield f"Checks: {told(result['circumstances'])}"


if __name__ == "__main__":
    main()
