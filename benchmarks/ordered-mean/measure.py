"""A mean over hosts in the order of ranks, against Gloo's ring, on limited links. Needs Linux and
root. Run it by `make bench-ordered-mean`.

      links of 100, 400, 1000 Mbit/s ── 2, 3, 4 hosts ── a process on each, one group
      round    every candidate once, in an order that chance makes, a barrier before each

All candidates live in the same processes, and a round's times are divided by those of its ring.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.hosts import namespaces
from benchmarks.hosts.namespaces import address
from benchmarks.hosts.program import as_a_program
from benchmarks.hosts.worker_pool import WorkerPool
from benchmarks.report_page import circumstances, write_result
from shoal.comm.deterministic import rank_order_mean

RESULT = Path(__file__).with_name("result.json")
RATES_MBIT, HOSTS, SIZES_MIB = (100, 400, 1000), (2, 3, 4), (1, 4, 16, 64)
ROUND_MIB = 64  # smaller tensors have more rounds, up to MOST_TIMES as many
MOST_TIMES = 4
PORT, LIMIT_S = 29500, 1800.0
LIMIT = timedelta(seconds=120)


def ring(tensor: Tensor) -> None:
    """Gloo's all-reduce: other orders at other positions, from three hosts on."""
    dist.all_reduce(tensor)
    tensor.div_(dist.get_world_size())


CANDIDATES: dict[str, Callable[[Tensor], object]] = {"ring": ring, "ordered": rank_order_mean}


def rank_on_host(
    pipe: Connection, rank: int, hosts: int, sizes_mib: Sequence[int], rounds: int
) -> dict[str, dict[str, list[float]]]:
    """One rank's part; return the slowest rank's seconds by size and candidate."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    meeting = f"tcp://{address(1)}:{PORT}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=hosts, timeout=LIMIT)
    chance, found = random.Random(0), {}
    for size_mib in sizes_mib:
        values = torch.randn(size_mib << 18, generator=torch.Generator().manual_seed(rank))
        times = min(MOST_TIMES, ROUND_MIB // size_mib)
        found[str(size_mib)] = _times(values, rounds * times, chance)
    dist.barrier()
    dist.destroy_process_group()
    return found


def _times(values: Tensor, rounds: int, chance: random.Random) -> dict[str, list[float]]:
    times_s: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    tensor, expected = torch.empty_like(values), whole(values)
    for turn in range(rounds + 1):  # the first does not count
        for name in chance.sample(list(CANDIDATES), len(CANDIDATES)):
            tensor.copy_(values)
            dist.barrier()
            begin_s = time.perf_counter()
            CANDIDATES[name](tensor)
            slowest = torch.tensor(time.perf_counter() - begin_s, dtype=torch.float64)
            assert name == "ring" or tensor.equal(expected), name
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if turn:
                times_s[name].append(slowest.item())
    return times_s


def whole(values: Tensor) -> Tensor:
    """Return the mean in the order of ranks, from all ranks' values."""
    terms = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(terms, values)
    total = terms[0]
    for term in terms[1:]:
        total += term
    return total.div_(len(terms))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5, help="of 64 MiB; smaller ones have more")
    parser.add_argument("--rates", type=int, nargs="+", default=RATES_MBIT, help="Mbit/s")
    parser.add_argument("--hosts", type=int, nargs="+", default=HOSTS)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES_MIB, help="MiB")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    result: dict[str, Any] = {"circumstances": circumstances(("torch", "shoal")), "cells": []}
    with as_a_program():
        for rate_mbit in options.rates:
            for hosts in options.hosts:
                with namespaces.hosts(hosts, rate_mbit), WorkerPool() as pool:
                    ranks = [
                        pool.start(
                            rank + 1, rank_on_host, rank, hosts, options.sizes, options.rounds
                        )
                        for rank in range(hosts)
                    ]
                    found, *_ = [pool.receive(rank, LIMIT_S) for rank in ranks]
                for size_mib, times_s in found.items():
                    cell = {"rate_mbit": rate_mbit, "hosts": hosts, "size_mib": int(size_mib)}
                    result["cells"].append(cell | {"times_s": times_s})
                write_result(options.out, result)


if __name__ == "__main__":
    main()
