"""Measures the table that `--allreduce auto` goes by, on namespaces with limited links, and writes it where Shoal
looks. Needs Linux and root. Run it by `make measure-allreduce`; your own cluster's table: docs/collectives.md.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.hosts import network
from benchmarks.hosts.cast import Cast
from benchmarks.page import circumstances
from shoal.comm.algorithms.table import MEASURED
from shoal.comm.algorithms.timing import measured, merged
from shoal.comm.axis import Axis
from shoal.errors import ShoalError

RATE_MBIT, LIMIT_S, PORT = 1000, 900.0, 29500
WORLDS = ((1, 2), (1, 4), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1))
"""Hosts, and ranks on each."""


def rank(pipe: Connection, number: int, ranks: int) -> list[dict[str, Any]]:
    """Be one rank."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    meeting = f"tcp://{network.address(1)}:{PORT}"
    dist.init_process_group("cpu:shoal", init_method=meeting, rank=number, world_size=ranks)
    rows = measured(Axis(number, ranks, torch.device("cpu")))
    dist.barrier()
    dist.destroy_process_group()
    return rows


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    facts = circumstances(("torch", "shoal"))
    machine = f"{facts['machine']}; hosts are network namespaces with links of {RATE_MBIT} Mbit/s; {facts['date']}"
    machine += f", load average {facts['load']} beforehand"
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else MEASURED
    try:
        with network.hosts(max(hosts for hosts, _ in WORLDS), RATE_MBIT):
            rows: list[dict[str, Any]] = []
            for hosts, each in WORLDS:
                started_s = time.perf_counter()
                with Cast() as cast:
                    actors = [cast.start(n // each + 1, rank, n, hosts * each) for n in range(hosts * each)]
                    first, *_ = [cast.hear(actor, LIMIT_S) for actor in actors]
                rows += first
                print(hosts, each, f"{time.perf_counter() - started_s:.0f} s", json.dumps(rows[-7:]), flush=True)
        file.write_text(merged([], machine, rows))
    except ShoalError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
