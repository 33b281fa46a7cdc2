"""Faults times strategies, on one host: each cell some seeded trials. `make bench-faults`.

Rank and step of a fault follow from the seed. No trial is repeated if it fails.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.faults.trial import SERVERS, Trial, make_trial, undisturbed
from benchmarks.report_page import circumstances

RESULT = Path(__file__).with_name("result.json")
STRATEGIES = {
    "ddp": "ddp",
    "zero3": "zero3",
    "tensor": "tensor=2",
    "pipeline": "pipeline=2",
    **SERVERS,
}
EVERYWHERE = (
    "rank killed",
    "rank crashes (SIGSEGV)",
    "rank stopped",
    "rank sleeps in a step",
    "rank in C, interpreter locked",
    "data blocks",
    "loader worker killed",
    "loader worker stopped",
    "fork server killed",
    "slow",
)
OF_SERVERS = (
    "spawner killed",
    "spawner and coordinator killed",
    "coordinator killed",
    "server killed",
    "server stopped",
    "rank and server killed",
)


def cells(strategies: list[str]) -> Iterator[tuple[str, str]]:
    for strategy in strategies:
        for fault in EVERYWHERE:
            if not (fault == "slow" and strategy == "pipeline"):  # one rank a stage
                yield fault, strategy
        if strategy in SERVERS:
            yield from ((fault, strategy) for fault in OF_SERVERS)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--faults", nargs="+", default=[])
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    result: dict[str, Any] = {"trials": []}
    if options.out.exists():
        result = json.loads(options.out.read_text())
    result["circumstances"] = circumstances(("torch", "shoal"))
    expected: dict[tuple[str, bool], str] = {}
    chosen = [cell for cell in cells(options.strategies) if cell[0] in (options.faults or cell)]
    for fault, strategy in chosen:
        key = strategy, "worker" in fault
        if key not in expected:
            expected[key] = undisturbed(STRATEGIES[strategy], _settings(fault))
    work = [(*cell, options.seed + n) for n in range(options.trials) for cell in chosen]
    with ThreadPoolExecutor(options.at_once) as pool:
        for trial in pool.map(lambda item: one(*item, expected), work):
            result["trials"].append(trial.as_dict())
            options.out.write_text(json.dumps(result, indent=1) + "\n")
            print(trial, flush=True)


def one(fault: str, strategy: str, seed: int, expected: dict[tuple[str, bool], str]) -> Trial:
    """Run one trial of a cell."""
    draw = random.Random(f"{fault} {strategy} {seed}")
    # Rank 0 starts the helpers, so only there their processes are known.
    rank = 0 if fault in OF_SERVERS else draw.randrange(2)
    order = {"rank": rank, "step": 4 if fault == "slow" else draw.randrange(10, 50)}
    return make_trial(
        fault,
        (strategy, STRATEGIES[strategy]),
        seed,
        order,
        _settings(fault),
        expected[strategy, "worker" in fault],
    )


def _settings(fault: str) -> dict[str, object]:
    return {"data.workers": 1} if "worker" in fault else {}


if __name__ == "__main__":
    main()
