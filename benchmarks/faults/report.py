"""Turns result.json into the tables of README.md. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.faults.faulty_run import LIMIT_S
from benchmarks.faults.kinds import KINDS, PLACES, Kind
from benchmarks.report_page import publish, table


def page(result: dict[str, Any]) -> Iterator[str]:
    trials = [trial for found in result["trials"].values() for trial in found]
    promises: dict[str, list[list[str]]] = {}
    for kind in KINDS:
        promises.setdefault(kind.promise, []).append(_row(result["trials"], kind))
    for promise, rows in promises.items():
        yield table([f"promise: {promise}", *PLACES], rows)
    yield (
        f"{sum(trial['held'] for trial in trials)} of {len(trials)} trials held. A cell: trials "
        "that held / trials; the longest time in seconds from the fault until it was told, and "
        "until the next step was done. Empty: not measured, or not possible there. The limit of "
        f"hangs was {LIMIT_S:g} s."
    )
    costs = ", ".join(f"{name} {us:.2f} us" for name, us in result["writer_us"].items())
    yield f"The words cost a rank, in Python: {costs}."


def _row(trials: dict[str, list[dict[str, Any]]], kind: Kind) -> list[str]:
    """Return the row of a fault: its trials under all strategies, by place."""
    cells = []
    for place in PLACES:
        found = trials.get(f"{place}: {kind.name}", [])
        words = [f"{sum(t['held'] for t in found)}/{len(found)}"] if found else []
        for name in ("told_s", "step_s"):
            times = [t[name] for t in found if t[name] is not None]
            words += [f"{max(times):.1f}"] if times else []
        if failed := dict.fromkeys(t["strategy"] for t in found if not t["held"]):
            words.append(f"failed under {', '.join(failed)}")
        cells.append("; ".join(words))
    return [kind.name, *cells]


if __name__ == "__main__":
    publish(Path(__file__).parent, page)
