"""Seconds of a step over 1 to 8 hosts with limited links, computing replaced by a wait. Needs Linux
and root. Run it by `make bench-scaling`.

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

RESULT = Path(__file__).with_name("result.json")
RATE_MBIT, SIZE_MIB, PART_MIB, STEPS, COMPUTE_S = 100, 4, 0.5, 3, 1.0
HOSTS, HOSTS_OF_TWO = (1, 2, 3, 4, 6, 8), (2, 4, 8)
ALGORITHMS = ("ring", "tree")


class Cell(NamedTuple):
    """One thing to measure.

    Args: by: an all-reduce, "one server", or "as many servers as workers". hosts: that compute.
    """

    by: str
    hosts: int
    ranks_per_host: int = 1


def cells() -> list[Cell]:
    """Those of a round."""
    found = [Cell("nothing", 1)]
    found += [Cell(by, hosts) for by in ALGORITHMS for hosts in HOSTS[1:]]
    found += [
        Cell(by, hosts) for by in ("one server", "as many servers as workers") for hosts in HOSTS
    ]
    found += [Cell(by, hosts, 2) for by in ("ring", "hierarchical") for hosts in HOSTS_OF_TWO]
    return found


def measured(cell: Cell) -> dict[str, float]:
    """The slowest rank's seconds of a step, and the share of the cores' time that was used."""
    work = Work(SIZE_MIB, PART_MIB, STEPS, COMPUTE_S)
    if "server" in cell.by:
        servers = 1 if cell.by == "one server" else cell.hosts
        return by_servers(work, cell.hosts, servers, first_host=max(HOSTS) + 1)
    return by_all_reduce(work, cell.by, cell.hosts * cell.ranks_per_host, cell.ranks_per_host)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--more", action="store_true", help="add to the rounds of result.json")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    setting = {"rate_mbit": RATE_MBIT, "size_mib": SIZE_MIB, "part_mib": PART_MIB, "steps": STEPS}
    result: dict[str, Any] = {"circumstances": circumstances(("torch", "shoal"))}
    result |= {"setting": {**setting, "compute_s": COMPUTE_S}, "link_bytes_per_s": [], "cells": []}
    if options.more:
        result = json.loads(options.out.read_text())
    first = len(result["link_bytes_per_s"])
    with as_a_program(), namespaces.hosts(2 * max(HOSTS), RATE_MBIT):
        for number in range(first, first + options.rounds):
            measure_round(result, number, cells(), measured, SIZE_MIB * 2**20)
            write_result(options.out, result)


if __name__ == "__main__":
    main()
