"""A step of training by a hand-written DistributedDataParallel loop, the same on each backend, over
a group that sends nothing, and without DistributedDataParallel at all.

      none        forward, backward, step
      DDP alone   the same, buckets, hooks, calls of a group that returns at once
      shoal       the same, and an exchange
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.interleaved import in_turns
from shoal.shm_backend.call_queue import CompletedWork
from shoal.shm_backend.group import ShoalGroup


class SendsNothing(ShoalGroup):
    """A group whose all-reduce returns at once: a step over it is what torch itself costs."""

    def allreduce(self, tensors: Any = None, opts: Any = None, *args: Any, **named: Any) -> Any:
        return CompletedWork(tensors)


def networks() -> dict[str, tuple[Callable[[], nn.Module], int]]:
    """Models trained on 8 x 8 images, 32 on each rank, and the steps of a turn."""

    def mlp() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    return {"MLP 64-256-10": (mlp, 50), "CNN": (_cnn, 30), "MLP of 2 million": (_wide, 10)}


def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds for a step on the slower rank; by network and by group. Collective."""
    ours, alone = dist.new_group(backend="cpu:shoal"), dist.new_group(backend="cpu:shoal")
    groups = {"shoal": ours, "DDP alone": alone, "none": None}
    found = {}
    for network, (make, steps) in networks().items():
        alone.__class__ = ShoalGroup  # DistributedDataParallel begins with real exchanges
        loops = {name: by_hand(make, group) for name, group in groups.items()}
        alone.__class__ = SendsNothing
        found[network] = in_turns(
            {name: partial(loop, steps) for name, loop in loops.items()}, steps, rounds
        )
    return found


def by_hand(
    make: Callable[[], nn.Module], group: dist.ProcessGroup | None
) -> Callable[[int], Tensor]:
    """Takes so many steps when it is called. Args: group: to average over; None for no other
    rank.
    """
    torch.manual_seed(0)
    model = make()
    if group is not None:
        model = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x, y = samples(dist.get_rank())

    def run(steps: int) -> Tensor:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        return loss

    return run


def samples(seed: int) -> tuple[Tensor, Tensor]:
    """The computation of a rank in a step."""
    made = torch.Generator().manual_seed(seed)
    return torch.randn(32, 1, 8, 8, generator=made), torch.randint(0, 10, (32,), generator=made)


def _cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(128, 10)),
    )


def _wide() -> nn.Module:
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()),
        *(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)),
    )
