"""Faults times strategies times places: each cell some seeded trials. `make bench-faults`.

Rank and step of a fault follow from the seed. No trial is repeated if it fails. With --missing,
cells that have as many trials already get no more.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from benchmarks.faults.kinds import KINDS, PLACES, STRATEGIES, Cell, cells
from benchmarks.faults.trial import Trial, make_trial, undisturbed
from benchmarks.report_page import circumstances, write_result

RESULT = Path(__file__).with_name("result.json")


def main() -> None:
    options = _arguments()
    result: dict[str, Any] = {"trials": {}}
    if options.out.exists():
        result = json.loads(options.out.read_text())
    result["circumstances"] = circumstances(("torch", "shoal"))
    chosen = [
        cell
        for cell in cells()
        if cell.place in options.places
        and cell.fault in (options.faults or [kind.name for kind in KINDS])
        and cell.strategy in options.strategies
    ]
    work = [(cell, options.seed + n) for n in range(options.trials) for cell in chosen]
    if options.missing:
        made = {
            (name, trial["strategy"], trial["seed"])
            for name, trials in result["trials"].items()
            for trial in trials
        }
        work = [(cell, seed) for cell, seed in work if (cell.name, cell.strategy, seed) not in made]
    expected: dict[str, str] = {}
    for cell, seed in work:
        trial = one(cell, seed, expected)
        result["trials"].setdefault(cell.name, []).append(trial.as_dict())
        write_result(options.out, result)
        print(trial, flush=True)


def one(cell: Cell, seed: int, expected: dict[str, str]) -> Trial:
    """Run one trial of a cell."""
    key = f"{cell.place} {cell.strategy} {cell.settings}"
    if key not in expected:
        expected[key] = undisturbed(cell)
    return make_trial(cell, seed, drawn_order(cell, seed), expected[key])


def drawn_order(cell: Cell, seed: int) -> dict[str, Any]:
    """Return where and when a trial meets its fault."""
    draw = random.Random(f"{cell.place} {cell.fault} {cell.strategy} {seed}")
    rank = draw.randrange(cell.ranks) if cell.kind.rank is None else cell.kind.rank
    host = [host for host, count in enumerate(cell.counts, 1) for _ in range(count)][rank]
    order: dict[str, Any] = {"fault": cell.fault, "rank": rank, "host": host}
    order["step"] = 4 if cell.fault == "slow" else draw.randrange(10, 50)
    if "again after" in cell.fault:
        order["then"] = {**order, "step": draw.randrange(16, 24)}
    return order


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--places", nargs="+", choices=PLACES, default=list(PLACES))
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--faults", nargs="+", default=[])
    parser.add_argument("--missing", action="store_true", help="leave out trials that there are")
    parser.add_argument("--out", type=Path, default=RESULT)
    return parser.parse_args()


if __name__ == "__main__":
    main()
