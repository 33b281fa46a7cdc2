"""Turns result.json into the tables of README.md. Measures nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.faults.faulty_run import LIMIT_S
from benchmarks.faults.kinds import KINDS, PLACES, Kind
from benchmarks.report_page import fill, table, told

HERE = Path(__file__).parent
PAGE = HERE / "README.md"


def main() -> None:
    result = json.loads((HERE / "result.json").read_text())
    trials = result["trials"]
    held = sum(trial["held"] for trial in trials)
    promises: dict[str, list[list[str]]] = {}
    for kind in KINDS:
        promises.setdefault(kind.promise, []).append(_row(trials, kind))
    text = [
        *(table([f"promise: {promise}", *PLACES], rows) for promise, rows in promises.items()),
        f"{held} of {len(trials)} trials held. A cell: trials that held / trials; the longest time "
        "in seconds from the fault until it was told, and until the next step was done. Empty: not "
        f"measured, or not possible there. The limit of hangs was {LIMIT_S:g} s.",
    ]
    text.append(told(result["circumstances"]))
    if "writer_us" in result:
        costs = ", ".join(f"{name} {us:.2f} us" for name, us in result["writer_us"].items())
        text.append(f"The words cost a rank, in Python: {costs}.")
    fill(PAGE, "\n\n".join(text))
    print(f"{held} of {len(trials)} held")


def _row(trials: list[dict[str, Any]], kind: Kind) -> list[str]:
    """Return the row of a fault: its trials under all strategies, by place."""
    cells = []
    for place in PLACES:
        found = [t for t in trials if (t["place"], t["fault"]) == (place, kind.name)]
        words = [f"{sum(t['held'] for t in found)}/{len(found)}"] if found else []
        for name in ("told_s", "step_s"):
            times = [t[name] for t in found if t[name] is not None]
            words += [f"{max(times):.1f}"] if times else []
        if failed := dict.fromkeys(t["strategy"] for t in found if not t["held"]):
            words.append(f"failed under {', '.join(failed)}")
        cells.append("; ".join(words))
    return [kind.name, *cells]


if __name__ == "__main__":
    main()
