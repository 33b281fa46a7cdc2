"""Seconds of a step over m workers and n servers, each on a host of its own, and of a ring on the
same links. Needs Linux and root. Run it by `make bench-servers-needed`.

    round    a link by itself │ every cell once, in an order that chance makes
    cell     start processes ── one step ── barrier ── timed steps ── check weights ── end them
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.hosts import namespaces
from benchmarks.hosts.exchange import Work
from benchmarks.hosts.program import as_a_program
from benchmarks.hosts.rounds import measure_round
from benchmarks.hosts.step import by_all_reduce, by_servers
from benchmarks.report_page import circumstances, write_result

from . import training

RESULT = Path(__file__).with_name("result.json")
RATE_MBIT, SIZE_MIB, PART_MIB, STEPS = 400, 24, 1, 3
WORKERS, SERVERS, COMPUTE_S = (1, 2, 3, 4), (1, 2, 3, 4, 6), (0.75, 1.5)


class Cell(NamedTuple):
    """One thing to measure; `by` is servers, ring or ordered, and `servers` 0 where there are
    none.
    """

    by: str
    workers: int
    servers: int
    compute_s: float


def cells() -> list[Cell]:
    """Those of a round."""
    found = [Cell("servers", m, n, 0) for m in WORKERS for n in SERVERS]
    found += [Cell(by, m, 0, 0) for by in ("ring", "ordered") for m in WORKERS if m > 1]
    for compute_s in COMPUTE_S:
        found += [Cell("servers", max(WORKERS), n, compute_s) for n in SERVERS]
        found += [Cell("ring", max(WORKERS), 0, compute_s)]
    return found


def measured(cell: Cell) -> dict[str, float]:
    """The slowest worker's seconds of a step, and the share of the cores' time that was used."""
    work = Work(SIZE_MIB, PART_MIB, STEPS, cell.compute_s)
    if cell.by == "servers":
        return by_servers(work, cell.workers, cell.servers, first_host=len(WORKERS) + 1)
    return by_all_reduce(work, {"ring": "ring (Gloo)"}.get(cell.by, cell.by), cell.workers)


def _write(result: dict[str, Any]) -> None:
    write_result(RESULT, result)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--more", action="store_true", help="add to the rounds of result.json")
    options = parser.parse_args()
    setting = {"rate_mbit": RATE_MBIT, "size_mib": SIZE_MIB, "part_mib": PART_MIB, "steps": STEPS}
    result: dict[str, Any] = {
        "circumstances": circumstances(("torch", "shoal")),
        "setting": setting,
    }
    result |= {"link_bytes_per_s": [], "cells": []}
    if options.more:
        result = json.loads(RESULT.read_text())
    with as_a_program(), namespaces.hosts(len(WORKERS) + max(SERVERS), RATE_MBIT):
        if "training" not in result:
            result["training"] = training.compared()
            _write(result)
        for _ in range(options.rounds):
            number = len(result["link_bytes_per_s"])
            measure_round(result, number, cells(), measured, SIZE_MIB * 2**20)
            _write(result)


if __name__ == "__main__":
    main()
