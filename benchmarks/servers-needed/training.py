"""A whole training on three hosts, started as a cluster's operator does it, and the same on one
host.

host 1   rank 0, coordinator, server of shard 0
host 2   rank 1, server of shard 1
host 3   rank 2
"""

from __future__ import annotations

import os
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.hosts.command import environment, shoal
from benchmarks.hosts.worker_pool import WorkerPool

RANKS, PORT, LIMIT_S = 3, 29600, 200.0
# Hosts are networks of one machine, so they could share memory; real ones cannot.
OPTIONS = [
    "--strategy",
    "server=2,shared_memory=false",
    "--train.epochs",
    "3",
    "--train.batch_size",
    "96",
]


def compared() -> dict[str, Any]:
    """Seconds of both, and whether they ended at the same weights to the last bit."""
    found: dict[str, Any] = {"options": " ".join(OPTIONS)}
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        runs = {where: Path(folder) / where for where in ("three hosts", "one host")}
        for where, run in runs.items():
            ranks = range(RANKS) if where == "three hosts" else [None]
            started_s = time.perf_counter()
            with WorkerPool() as pool:
                processes = [pool.start(1 + (rank or 0), train, run, rank) for rank in ranks]
                for process in processes:
                    pool.receive(process, LIMIT_S)
            found[where] = {"seconds": time.perf_counter() - started_s}
        ours, theirs = (_weights(run) for run in runs.values())
    found["same bits"] = all(torch.equal(ours[name], theirs[name]) for name in theirs)
    return found


def train(pipe: Connection, run: Path, rank: int | None) -> None:
    """One rank of those on several hosts, or all ranks on this one."""
    command = ["train", "digits", *OPTIONS, "--out", str(run)]
    if rank is None:
        shoal([*command, "-n", str(RANKS)], {**os.environ, "GLOO_SOCKET_IFNAME": "lo"})
    else:
        shoal(command, environment(rank, RANKS, PORT))


def _weights(run: Path) -> dict[str, torch.Tensor]:
    file = run.with_suffix(".safetensors")
    shoal(["export", str(run), "-o", str(file)], dict(os.environ))
    return load_file(file)
