"""Measures what the connections of servers cost, by network, and writes the table of
docs/security.md.

    python -m benchmarks.server.security

    4 MiB, round 1   TLS  Unix socket  plain TCP     some pushes and pulls each, a new order each
           round 2   plain TCP  TLS  Unix socket     round; ratios are formed within a round

All processes are there all the time and wait for their turn.
"""

from __future__ import annotations

import argparse
import random
import ssl
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.report_page import circumstances, fill, quartiles, table, told
from benchmarks.server.pusher import Job, Pusher
from shoal.parameter_server.transport.settings import UNIX

PAGE = Path(__file__).parents[2] / "docs/security.md"
LOOPBACK, PLAIN = "127.0.0.1", "`encrypt=false`: plain TCP"
NETWORKS = {
    "one machine: Unix socket": (UNIX, True),
    "TLS 1.3": (LOOPBACK, True),
    PLAIN: (LOOPBACK, False),
}
"""Where servers listen, and if they encrypt."""
WORKERS, SERVERS = 2, 1
ROUNDS_IN_A_TURN = {4: 8, 64: 2}  # by MiB
FEWEST, MOST = 3, 11  # turns of each candidate
LIMIT_S = 180.0  # for one answer of a worker


class WorkerProcesses:
    """The workers of one network, a process each, whose servers the first one starts."""

    def __init__(self, job: Job) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.server.security"])
        start = context.Barrier(WORKERS)
        self.pipes, self.processes = [], []
        for index in range(WORKERS):
            pipe, remote_end = context.Pipe()
            process = context.Process(target=_work, args=(job, index, start, remote_end))
            process.start()
            remote_end.close()
            self.pipes.append(pipe)
            self.processes.append(process)
        self._receive_all()

    def run_rounds(self, rounds: int) -> float:
        """Return the seconds of a round, from the first worker's start to the last one's end."""
        for pipe in self.pipes:
            pipe.send(rounds)
        started, ended = zip(*self._receive_all(), strict=True)
        return (max(ended) - min(started)) / rounds

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(0)
        for process in self.processes:
            process.join()

    def _receive_all(self) -> list[Any]:
        for pipe in self.pipes:
            if not pipe.poll(LIMIT_S):
                raise SystemExit(f"a worker has not answered for {LIMIT_S:g} s")
        return [pipe.recv() for pipe in self.pipes]


def _work(job: Job, index: int, start: Any, driver: Connection) -> None:
    torch.set_num_threads(1)
    worker = Pusher(job, index)
    worker.check()
    driver.send(None)
    while rounds := driver.recv():
        start.wait()
        started_s = time.monotonic()
        for _ in range(rounds):
            worker.round()
        driver.send((started_s, time.monotonic()))
    worker.close()


def measured(mib: int, seconds: float) -> dict[str, list[float]]:
    """Return the seconds of a round over each network, a number for each of its turns."""
    with tempfile.TemporaryDirectory() as folder:
        candidates = {}
        for number, (name, (host, encrypt)) in enumerate(NETWORKS.items()):
            own = Path(folder, str(number))
            own.mkdir()
            job = Job(own, host, encrypt, WORKERS, SERVERS, mib << 18)
            candidates[name] = WorkerProcesses(job)
        rounds, chance = ROUNDS_IN_A_TURN[mib], random.Random(0)
        for candidate in candidates.values():
            candidate.run_rounds(rounds)  # does not count
        times_s: dict[str, list[float]] = {name: [] for name in candidates}
        end_s = time.monotonic() + seconds
        for turn in range(MOST):
            if turn >= FEWEST and time.monotonic() > end_s:
                break
            for name in chance.sample(list(candidates), len(candidates)):
                times_s[name].append(candidates[name].run_rounds(rounds))
        for candidate in candidates.values():
            candidate.close()
    return times_s


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=30, help="of one size")
    options = parser.parse_args()
    facts = circumstances(["torch", "cryptography"])
    facts["versions"] += f", {ssl.OPENSSL_VERSION}"
    rows = {name: [name] for name in NETWORKS}
    head = [f"{WORKERS} workers, {SERVERS} server, over loopback"]
    for mib in ROUNDS_IN_A_TURN:
        head += [f"{mib} MiB: GB/s (quartiles)", "of plain TCP"]
        times_s = measured(mib, options.seconds)
        for name, turns in times_s.items():
            speeds = [2 * WORKERS * (mib << 20) / s / 1e9 for s in turns]
            share = median(plain / s for plain, s in zip(times_s[PLAIN], turns, strict=True))
            rows[name] += [quartiles(speeds), f"{share:.2f}"]
    fill(PAGE, f"{table(head, list(rows.values()))}\n\n{told(facts)}")


if __name__ == "__main__":
    main()
