"""A message to a rank and one back, on each backend: half of that is the time of a send and its receipt."""

from __future__ import annotations

import random
import time

import torch
import torch.distributed as dist

SIZES_BYTES = (1 << 10, 1 << 16, 1 << 20, 1 << 24)
TURN_BYTES = 1 << 24  # how much goes to and fro in one turn, about
MOST_CALLS = 100


def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds for a send and its receipt, between the first two ranks; by size and by backend. Collective."""
    groups = {"Gloo": dist.new_group(backend="gloo"), "shoal": dist.new_group(backend="cpu:shoal")}
    tensor, chance = torch.zeros(SIZES_BYTES[-1] // 4), random.Random(0)
    found: dict[str, dict[str, list[float]]] = {}
    for size_bytes in SIZES_BYTES:
        times_s: dict[str, list[float]] = {name: [] for name in groups}
        calls = max(1, min(MOST_CALLS, TURN_BYTES // size_bytes))
        for turn in range(rounds + 1):  # the first does not count
            for name in chance.sample(list(groups), len(groups)):
                dist.barrier()
                time_s = _to_and_fro(tensor[: size_bytes // 4], groups[name], calls)
                if turn:
                    times_s[name].append(time_s)
        found[str(size_bytes)] = times_s
    return found


def _to_and_fro(tensor: torch.Tensor, group: dist.ProcessGroup, calls: int) -> float:
    rank, begin_s = dist.get_rank(), time.perf_counter()
    if rank < 2:
        for _ in range(calls):
            if rank == 0:
                dist.send(tensor, 1, group)
                dist.recv(tensor, 1, group)
            else:
                dist.recv(tensor, 0, group)
                dist.send(tensor, 0, group)
    return (time.perf_counter() - begin_s) / calls / 2
