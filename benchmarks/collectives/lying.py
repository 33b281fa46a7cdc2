"""What it saves that tensors lie in shared memory already: each thing with them there and elsewhere, in turns.

all-reduce     a tensor from the backend's room          one of torch's
DDP            buckets that the backend has moved        DDP_DISABLE_COMM_MEM=1
fully_shard    set_allocate_memory_from_process_group    without it
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.collectives.steps import WARM_UP, networks

SIZES_BYTES = (1 << 16, 1 << 20, 1 << 21, 1 << 22, 1 << 26)
TURN_BYTES = 1 << 26
MOST_CALLS = 100
SWITCH = "DDP_DISABLE_COMM_MEM"
Turn = Callable[[], None]


def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each thing, "there" and "elsewhere", by round. Collective."""
    group: Any = dist.new_group(backend="cpu:shoal")
    found = {}
    for size_bytes in SIZES_BYTES:
        calls = min(MOST_CALLS, max(1, TURN_BYTES // size_bytes))
        turns = {where: _all_reduce(group, size_bytes // 4, calls, where) for where in ("there", "elsewhere")}
        found[f"all-reduce of {size_bytes >> 10} KB"] = _in_turns(turns, calls, rounds)
    for network, (make, steps) in networks().items():
        for engine, loop in {"DDP": _ddp, "fully_shard": _sharded}.items():
            turns = {where: loop(make, group, steps, where) for where in ("there", "elsewhere")}
            found[f"{engine}, {network}"] = _in_turns(turns, steps, rounds)
    return found


def _in_turns(turns: dict[str, Turn], count: int, rounds: int) -> dict[str, list[float]]:
    chance, times_s = random.Random(0), {name: list[float]() for name in turns}
    for number in range(rounds + 1):  # the first does not count
        for name in chance.sample(list(turns), len(turns)):
            dist.barrier()
            begin_s = time.perf_counter()
            turns[name]()
            dist.barrier()
            if number:
                times_s[name].append((time.perf_counter() - begin_s) / count)
    return times_s


def _all_reduce(group: Any, length: int, calls: int, where: str) -> Turn:
    tensor = torch.zeros(length)
    if where == "there":
        backend = group._get_backend(tensor.device)
        tensor = backend.allocate_tensor(length, dtype=tensor.dtype, device=tensor.device).zero_()

    def turn() -> None:
        for _ in range(calls):
            dist.all_reduce(tensor, group=group)

    return turn


def _ddp(make: Callable[[], nn.Module], group: Any, steps: int, where: str) -> Turn:
    torch.manual_seed(0)
    train = _training(DistributedDataParallel(make(), process_group=group))

    def turn() -> None:
        os.environ[SWITCH] = "0" if where == "there" else "1"
        train(max(steps, WARM_UP))
        os.environ.pop(SWITCH)

    return turn


def _sharded(make: Callable[[], nn.Module], group: Any, steps: int, where: str) -> Turn:
    torch.manual_seed(0)
    model = make()
    fully_shard(model, mesh=dist.DeviceMesh.from_group(group, "cpu"))
    assert isinstance(model, FSDPModule)
    model.set_allocate_memory_from_process_group_for_comm(where == "there")
    train = _training(model)
    return lambda: train(max(steps, WARM_UP))


def _training(model: nn.Module) -> Callable[[int], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    made = torch.Generator().manual_seed(dist.get_rank())
    x: Tensor = torch.randn(32, 1, 8, 8, generator=made)
    y = torch.randint(0, 10, (32,), generator=made)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return train
