"""Turns result.json into the tables of docs/faults.md. Measures nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.faults.faulty_run import LIMIT_S
from benchmarks.faults.kinds import KINDS, PLACES, STRATEGIES, Cell, Kind
from benchmarks.report_page import fill, table, told

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "faults.md"


def main() -> None:
    result = json.loads((HERE / "result.json").read_text())
    trials = result["trials"]
    text = []
    for place in PLACES:
        text += [f"### {place.capitalize()}", _table(trials, place)]
    held = sum(trial["held"] for trial in trials)
    text.append(
        f"{held} of {len(trials)} trials held. A cell: trials that held / trials; the longest time "
        "in seconds from the fault until it was told, and until the next step was done. Empty: not "
        f"measured yet. The limit of hangs was {LIMIT_S:g} s."
    )
    text.append(told(result["circumstances"]))
    if "writer_us" in result:
        costs = ", ".join(f"{name} {us:.2f} us" for name, us in result["writer_us"].items())
        text.append(f"The words cost a rank, in Python: {costs}.")
    fill(PAGE, "\n\n".join(text))
    print(f"{held} of {len(trials)} held")


def _table(trials: list[dict[str, Any]], place: str) -> str:
    """Return the table of a place, and behind it the kinds that cannot be there, with why."""
    here = [kind for kind in KINDS if any(not Cell(place, kind, s).absent for s in STRATEGIES)]
    rows = [
        [kind.name, kind.promise, *(_cell(trials, place, kind, name) for name in STRATEGIES)]
        for kind in here
    ]
    text = table(["fault", "promise", *STRATEGIES], rows)
    for reason in sorted({kind.absent[PLACES.index(place)] for kind in KINDS} - {""}):
        names = [kind.name for kind in KINDS if kind.absent[PLACES.index(place)] == reason]
        text += f"\n\nNot here ({reason}): {'; '.join(names)}."
    return text


def _cell(trials: list[dict[str, Any]], place: str, kind: Kind, strategy: str) -> str:
    if Cell(place, kind, strategy).absent:
        return Cell(place, kind, strategy).absent
    key = place, kind.name, strategy
    found = [t for t in trials if (t["place"], t["fault"], t["strategy"]) == key]
    if not found:
        return ""
    words = [f"{sum(t['held'] for t in found)}/{len(found)}"]
    for name in ("told_s", "step_s"):
        times = [t[name] for t in found if t[name] is not None]
        words.append(f"{max(times):.1f}" if times else "-")
    return "; ".join(words)


if __name__ == "__main__":
    main()
