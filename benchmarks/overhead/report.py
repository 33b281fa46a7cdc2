"""Turns result.json into the table of README.md and overhead.png. Measures nothing."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.overhead.checks import rows_of
from benchmarks.report_page import bars, fill, table, told

HERE = Path(__file__).parent
YARDSTICK = "hand-written DDP"
BY_HAND = "by hand over Gloo"
TOLD_CHECKS = ("a step", "all checks", "the same")


def main() -> None:
    result = json.loads((HERE / "result.json").read_text())
    tasks = {name: spreads(task) for name, task in result["tasks"].items()}
    rows = _rows(result["tasks"], tasks)
    text = f"{rows}\n\n{_same_work(result)}\n\n{told(result['circumstances'])}"
    if (backends := HERE / "backends.json").exists():
        text += f"\n\n{over_backends(json.loads(backends.read_text()))}"
    if (checks := HERE / "checks.json").exists():
        text += f"\n\n{of_checks(json.loads(checks.read_text()))}"
    fill(HERE / "README.md", text)
    title = "Time of a step on two CPU processes, hand-written loop = 1 (median, quartiles)"
    bars(HERE / "overhead.png", title, "ratio", tasks, YARDSTICK)
    print(text)


def spreads(task: dict[str, Any]) -> dict[str, tuple[float, float, float]]:
    """Lower quartile, median and upper quartile of each candidate's ratio to the yardstick in
    the same round.
    """
    yardstick = task["step_s"][YARDSTICK]
    ratios = {
        name: [a / b for a, b in zip(times, yardstick, strict=True)]
        for name, times in task["step_s"].items()
    }
    found = {name: tuple(quantiles(values, n=4)) for name, values in ratios.items()}
    return found  # type: ignore[return-value]  # quantiles of 4 parts are three


def _rows(measured: dict[str, Any], tasks: dict[str, dict[str, tuple[float, float, float]]]) -> str:
    head = [
        "ratio of step times: median (quartiles)",
        *(f"{n}, {t['rounds']} rounds" for n, t in measured.items()),
    ]
    rows = []
    for name in next(iter(tasks.values())):
        cells = []
        for task, found in tasks.items():
            low, middle, high = found[name]
            step_ms = median(measured[task]["step_s"][name]) * 1e3
            cells.append(
                f"1 = {step_ms:.2f} ms"
                if name == YARDSTICK
                else f"{middle:.2f} ({low:.2f} to {high:.2f})"
            )
        rows.append([f"**{name}**" if name == "Shoal" else name, *cells])
    return table(head, rows)


def over_backends(measured: dict[str, Any]) -> str:
    """The table of backends.json: medians, over rounds, of ratios to the hand-written step over
    Gloo.
    """
    columns = [
        (run, name)
        for run, found in measured.items()
        for name in next(iter(found["step_s"].values()))
    ]
    columns = [(run, name) for run, name in columns if name != BY_HAND]
    head = [
        "step / the hand-written one over Gloo: median (quartiles)",
        *(name for _, name in columns),
    ]
    rows = []
    for task in next(iter(measured.values()))["step_s"]:
        cells = []
        for run, name in columns:
            steps = measured[run]["step_s"].get(task, {})
            cells.append(_ratio(steps[name], steps[BY_HAND]) if name in steps else "")
        rows.append([task, *cells])
    return f"{table(head, rows)}\n\n{told(next(iter(measured.values()))['circumstances'])}"


def of_checks(measured: dict[str, Any]) -> str:
    """Return the table of checks.json."""
    columns = {name: dict(rows_of(found)) for name, found in measured["found"].items()}
    names = [name for name in next(iter(columns.values())) if name.startswith(TOLD_CHECKS)]
    rows = [[name, *(column[name] for column in columns.values())] for name in names]
    head = ["share of a step: of fastest tenths; median of rounds (its spread)", *columns]
    return f"{table(head, rows)}\n\nChecks: {told(measured['circumstances'])}"


def _ratio(step_s: list[float], yardstick_s: list[float]) -> str:
    low, middle, high = quantiles([a / b for a, b in zip(step_s, yardstick_s, strict=True)], n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def _same_work(result: dict[str, Any]) -> str:
    furthest = max(result["difference_after_one_epoch"].values())
    return (
        "Same work: after one unshuffled epoch of the MLP, no candidate's parameters are further "
        "from the "
        f"hand-written loop's than {furthest:.1e} of the way that training has moved them."
    )


if __name__ == "__main__":
    main()
