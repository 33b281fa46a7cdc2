"""Turns result.json into the table of docs/faults.md. Measures nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.faults.measure import EVERYWHERE, OF_SERVERS, STRATEGIES
from benchmarks.faults.trial import LIMIT_S
from benchmarks.report_page import fill, table, told

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "faults.md"


def main() -> None:
    result = json.loads((HERE / "result.json").read_text())
    trials = result["trials"]
    head = ["fault", *STRATEGIES]
    rows = [
        [fault, *(_cell(trials, fault, strategy) for strategy in STRATEGIES)]
        for fault in (*EVERYWHERE, *OF_SERVERS)
    ]
    held = sum(trial["held"] for trial in trials)
    text = [
        table(head, rows),
        f"{held} of {len(trials)} trials held. A cell: trials that held / trials; the longest time "
        "in seconds from the fault until it was told, and until the next step was done. The limit "
        f"of hangs was {LIMIT_S:g} s.",
        told(result["circumstances"]),
    ]
    if "writer_us" in result:
        costs = ", ".join(f"{name} {us:.2f} us" for name, us in result["writer_us"].items())
        text.append(f"The words cost a rank, in Python: {costs}.")
    fill(PAGE, "\n\n".join(text))
    print(text[0])


def _cell(trials: list[dict[str, Any]], fault: str, strategy: str) -> str:
    found = [t for t in trials if (t["fault"], t["strategy"]) == (fault, strategy)]
    if not found:
        return ""
    words = [f"{sum(t['held'] for t in found)}/{len(found)}"]
    for name in ("told_s", "step_s"):
        times = [t[name] for t in found if t[name] is not None]
        words.append(f"{max(times):.1f}" if times else "-")
    return "; ".join(words)


if __name__ == "__main__":
    main()
