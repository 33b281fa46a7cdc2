"""Seconds of training until a fixed accuracy, on hosts with slow links, for each way to send less.
Needs Linux and root. Run it by `make bench-slow-links`.

    round    every way once, in an order that chance makes; the seed is the round's number
    way      a rank on each host ── an evaluation after each epoch (not timed) ── bytes of the link
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.hosts import namespaces
from benchmarks.hosts.command import environment, shoal
from benchmarks.hosts.program import as_a_program
from benchmarks.hosts.worker_pool import WorkerPool
from benchmarks.report_page import circumstances, write_result

from .cases import HOSTS, RATE_MBIT, TARGET_TOP1, TASK, WAYS

RESULT = Path(__file__).with_name("result.json")
PORT, LIMIT_S = 29700, 600.0


def rank(pipe: Connection, number: int, flags: list[str]) -> int:
    """One rank's whole training; the bytes that its host sent meanwhile."""
    before = _sent_bytes()
    shoal(["train", *TASK, *flags], environment(number, HOSTS, PORT))
    return _sent_bytes() - before


def trained(way: str, seed: int) -> dict[str, Any]:
    """One run: (step, seconds, top1) of every evaluation, and the bytes that a host sent."""
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder, WorkerPool() as pool:
        out = Path(folder) / "run"
        flags = ["--strategy", way, "--seed", str(seed), "--out", str(out)]
        processes = [pool.start(1 + number, rank, number, flags) for number in range(HOSTS)]
        sent = [pool.receive(process, LIMIT_S) for process in processes]
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    found = [(r["step"], r["time_s"], r["top1"]) for r in records if r["kind"] == "validation"]
    return {"evaluations": found, "sent_bytes": max(sent)}


def _sent_bytes() -> int:
    """By this process's host, since it was made."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return next(
        int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("eth0:")
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    setting = {"hosts": HOSTS, "rate_mbit": RATE_MBIT, "target_top1": TARGET_TOP1}
    result: dict[str, Any] = {
        "circumstances": circumstances(("torch", "shoal")),
        "setting": {**setting, "task": " ".join(TASK)},
        "runs": [],
    }
    with as_a_program(), namespaces.hosts(HOSTS, RATE_MBIT):
        for seed in range(options.rounds):
            for way in random.Random(seed).sample(WAYS, len(WAYS)):
                found = trained(way, seed)
                result["runs"].append({"way": way, "seed": seed, **found})
                write_result(RESULT, result)
                print(seed, way, found["sent_bytes"], found["evaluations"], flush=True)


if __name__ == "__main__":
    main()
