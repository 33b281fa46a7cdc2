"""Measures all candidates in turns, on one machine, and writes result.json. Run it by `make
bench-server`.

    (2 workers, 1 server), 16 MiB     round 1   TCP echo  Ray  Gloo  ...     one or more pushes and
                                      round 2   Gloo  TCP echo  Ray  ...     pulls each; a new order
                                      ...

Every candidate's processes are there all the time and wait for their turn. Whatever slows the
machine down for longer than all turns of a round slows all candidates down, so it is the ratios
within a round that are believed."""

from __future__ import annotations

import argparse
import importlib
import json
import random
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing

from benchmarks.report_page import circumstances, write_result
from benchmarks.server.candidate import Candidate, Missing, gradient

RESULT = Path(__file__).with_name("result.json")
CANDIDATES = {
    "shared memory echo": "shared_memory",
    "TCP echo, streamed": "tcp_stream",
    "TCP echo, by parts": "tcp_parts",
    "pyzmq echo": "zeromq",
    "Shoal": "shoal",
    "Shoal over a Unix socket": "shoal_unix",
    "Shoal over TLS": "shoal_tls",
    "Shoal over TCP": "shoal_tcp",
    "Gloo all_reduce": "gloo",
    "torch RPC": "torch_rpc",
    "Ray actors": "ray_actors",
    "TensorFlow PS": "tensorflow_ps",
}
CREWS = ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4))  # workers, servers
ROUNDS_IN_A_TURN = {1: 16, 4: 8, 16: 4, 64: 2, 256: 1}  # by MiB
FEWEST, MOST = 3, 11  # turns of each candidate
MIB = 1 << 20
FLOAT_BYTES = 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--mib", type=int, nargs="+", default=list(ROUNDS_IN_A_TURN), choices=list(ROUNDS_IN_A_TURN)
    )
    parser.add_argument(
        "--crews", nargs="+", default=[f"{m},{n}" for m, n in CREWS], help="WORKERS,SERVERS"
    )
    parser.add_argument("--only", nargs="+", default=list(CANDIDATES), choices=[*CANDIDATES])
    parser.add_argument(
        "--cell-s",
        type=float,
        default=8,
        help="once it has taken that long, FEWEST turns are enough",
    )
    parser.add_argument("--more", action="store_true", help="keep the other cells of result.json")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    multiprocessing.set_forkserver_preload(["torch", "torch.distributed.rpc"])
    packages = ("torch", "ray", "pyzmq", "tensorflow_cpu")
    facts = circumstances([package for package in packages if find_spec(_module(package))])
    kept = json.loads(options.out.read_text()) if options.more else {"cells": [], "missing": {}}
    cells: list[dict[str, Any]] = [
        cell for cell in kept["cells"] if not _is_measured(cell, options)
    ]
    missing: dict[str, dict[str, str]] = kept["missing"]
    for crew in options.crews:
        workers, servers = map(int, crew.split(","))
        missing[crew] = {}
        running = start(options.only, workers, servers, missing[crew])
        for mib in options.mib:
            times_s = measure(running, workers, mib, options.cell_s)
            cells.append({"workers": workers, "servers": servers, "mib": mib, "round_s": times_s})
            # After every cell, so that a run that is cut short has measured something.
            write_result(options.out, {"circumstances": facts, "missing": missing, "cells": cells})
        for candidate in running.values():
            candidate.close()


def start(
    names: list[str], workers: int, servers: int, missing: dict[str, str]
) -> dict[str, Candidate]:
    """The candidates that can take part; why the others can't goes to `missing`."""
    running = {}
    for name in names:
        try:
            module = importlib.import_module(f"benchmarks.server.candidates.{CANDIDATES[name]}")
            running[name] = module.Candidate(workers, servers)
        except (ImportError, Missing) as why:
            missing[name] = str(why)
            print(f"{workers} workers, {servers} servers: {name} is missing: {why}", flush=True)
    return running


def measure(
    running: dict[str, Candidate], workers: int, mib: int, cell_s: float
) -> dict[str, list[float]]:
    """Seconds for a round of each candidate, one number for each of its turns."""
    gradients = [gradient(worker, mib * MIB // FLOAT_BYTES) for worker in range(workers)]
    rounds, chance = ROUNDS_IN_A_TURN[mib], random.Random(0)
    begun_s = time.monotonic()
    for candidate in running.values():
        candidate.prepare(gradients)
        candidate.check()
        candidate.run_rounds(rounds)  # does not count
    ready_s = time.monotonic()
    times_s: dict[str, list[float]] = {name: [] for name in running}
    for turns in range(MOST):
        if turns >= FEWEST and time.monotonic() - ready_s > cell_s:
            break
        for name in chance.sample(list(running), len(running)):
            times_s[name].append(running[name].run_rounds(rounds) / rounds)
    print(
        f"{workers} workers, {mib} MiB: {ready_s - begun_s:.1f} s to get ready, "
        f"{time.monotonic() - ready_s:.1f} s"
    )
    return times_s


def _is_measured(cell: dict[str, Any], options: argparse.Namespace) -> bool:
    return cell["mib"] in options.mib and f"{cell['workers']},{cell['servers']}" in options.crews


def _module(package: str) -> str:
    return {"pyzmq": "zmq", "tensorflow_cpu": "tensorflow"}.get(package, package)


if __name__ == "__main__":
    main()
