"""Seconds of a step over m workers and n servers, each on a host of its own, and of a ring on the
same links. Needs Linux and root. Run it by `make bench-servers-needed`.

    round    a link by itself │ every cell once, in an order that chance makes
    cell     start processes ── one step ── barrier ── timed steps ── check weights ── end them
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.hosts import namespaces
from benchmarks.hosts.exchange import Work
from benchmarks.hosts.program import as_a_program
from benchmarks.hosts.step import by_ring, by_servers, link
from benchmarks.report_page import circumstances, write_result

RESULT = Path(__file__).with_name("result.json")
RATE_MBIT, SIZE_MIB, PART_MIB, STEPS = 400, 24, 1, 3
WORKERS, SERVERS, COMPUTE_S = (1, 2, 3, 4), (1, 2, 3, 4, 6), (0.75, 1.5)


class Cell(NamedTuple):
    """One thing to measure; `by` is servers or ring, and `servers` 0 where there are none."""

    by: str
    workers: int
    servers: int
    compute_s: float


def cells() -> list[Cell]:
    """Those of a round."""
    found = [Cell("servers", m, n, 0) for m in WORKERS for n in SERVERS]
    found += [Cell("ring", m, 0, 0) for m in WORKERS if m > 1]
    for compute_s in COMPUTE_S:
        found += [Cell("servers", max(WORKERS), n, compute_s) for n in SERVERS]
        found += [Cell("ring", max(WORKERS), 0, compute_s)]
    return found


def measured(cell: Cell) -> dict[str, float]:
    """The slowest worker's seconds of a step, and the share of the cores' time that was used."""
    work = Work(SIZE_MIB, PART_MIB, STEPS, cell.compute_s)
    if cell.by == "servers":
        return by_servers(work, cell.workers, cell.servers, first_host=len(WORKERS) + 1)
    return by_ring(work, cell.workers)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    setting = {"rate_mbit": RATE_MBIT, "size_mib": SIZE_MIB, "part_mib": PART_MIB, "steps": STEPS}
    entries = {cell: {**cell._asdict(), "step_s": [], "busy": []} for cell in cells()}
    result: dict[str, Any] = {
        "circumstances": circumstances(("torch", "shoal")),
        "setting": setting,
        "link_bytes_per_s": [],
        "cells": list(entries.values()),
    }
    with as_a_program(), namespaces.hosts(len(WORKERS) + max(SERVERS), RATE_MBIT):
        for number in range(options.rounds):
            result["link_bytes_per_s"].append(link(SIZE_MIB * 2**20))
            for cell in random.Random(number).sample(list(entries), len(entries)):
                found = measured(cell)
                print(*cell, found, flush=True)
                for name, value in found.items():
                    entries[cell][name].append(value)
            write_result(RESULT, result)


if __name__ == "__main__":
    main()
