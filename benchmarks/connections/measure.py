"""Seconds of a push and a pull through one server, by one connection and by several, near and far.
Needs Linux and root. Run it by `make bench-connections`.

    round    every place, in turn ── one connection by itself ── every number of connections once, in an order of chance
    cell     a server and a worker start ── one step ── steps, timed ── weights checked ── they end
"""

from __future__ import annotations

import argparse
import json
import random
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.hosts import network
from benchmarks.hosts.exchange import Work
from benchmarks.hosts.far import two_hosts
from benchmarks.hosts.program import as_a_program
from benchmarks.hosts.step import by_servers, link
from benchmarks.page import circumstances

RESULT = Path(__file__).with_name("result.json")
SIZE_MIB, PART_MIB, STEPS = 8, 1, 2
CONNECTIONS = (1, 2, 4, 8)


class Place(NamedTuple):
    """Where the server is, as the worker sees it."""

    rate_mbit: int
    flight_s: float  # one way
    window_bytes: int | None  # the most that TCP's buffers grow to; the system's default where None

    def hosts(self) -> AbstractContextManager[None]:
        if self.flight_s == 0:
            return network.hosts(2, self.rate_mbit)
        return two_hosts(self.rate_mbit, self.flight_s, self.window_bytes)


PLACES = {
    "far, small buffers": Place(400, 0.02, 512 * 1024),
    "far": Place(400, 0.02, None),
    "near": Place(400, 0.0, None),
}


def measure_round(result: dict[str, Any], number: int) -> None:
    """Add a round to what there is."""
    for name, place in PLACES.items():
        with place.hosts():
            result["link_bytes_per_s"][name].append(link(SIZE_MIB * 2**20))
            for connections in random.Random(number).sample(CONNECTIONS, len(CONNECTIONS)):
                work = Work(SIZE_MIB, PART_MIB, STEPS, connections=connections)
                step_s = by_servers(work, workers=1, servers=1, first_host=2)["step_s"]
                result["step_s"][name][str(connections)].append(step_s)
                print(f"{name}, {connections} connections: {step_s:.2f} s", flush=True)


def _nothing() -> dict[str, Any]:
    return {
        "circumstances": circumstances(("torch", "shoal")),
        "setting": {
            "size_mib": SIZE_MIB,
            "part_mib": PART_MIB,
            "places": {name: place._asdict() for name, place in PLACES.items()},
        },
        "link_bytes_per_s": {name: [] for name in PLACES},
        "step_s": {name: {str(count): [] for count in CONNECTIONS} for name in PLACES},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--more", action="store_true", help="add to the rounds of result.json")
    options = parser.parse_args()
    result = json.loads(RESULT.read_text()) if options.more else _nothing()
    first = len(result["step_s"]["near"]["1"])
    with as_a_program():
        for number in range(first, first + options.rounds):
            measure_round(result, number)
            RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
