"""Short runs that are traced, and what ranks do to be slow."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import shoal
from shoal.run.supervised import supervised

LATE_S = 0.2


class Samples(Dataset):
    """Sixteen numbers each. Args: late_s: how long the first sample of each batch takes to come."""

    def __init__(self, late_s: float) -> None:
        self.late_s = late_s

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.late_s / 4)  # of four samples that a rank has in a batch
        return torch.full((16,), index / 48), torch.tensor(index % 4)


class Slow(nn.Module):
    """The identity, late: itself, or when its gradient comes."""

    def __init__(self, late_s: float = 0.0, backward_s: float = 0.0) -> None:
        super().__init__()
        self.late_s, self.backward_s = late_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            time.sleep(self.late_s)
        if x.requires_grad:
            x.register_hook(lambda _: time.sleep(self.backward_s))
        return x


def run_traced(
    directory: Path,
    strategy: str = "ddp",
    window: str | None = "2@2",
    slow: str = "",
    steps: int = 5,
) -> tuple[list[float], int]:
    """What a rank does: a few steps; rank 1 is slow at "data", "compute" or "backward".

    Returns: losses, and how many groups still record.
    """
    # Without the vote on finite steps, in which ranks would wait for each other instead.
    run = shoal.init(
        strategy, trace=window, trace_to=directory, nonfinite="ignore", announce=lambda _: None
    )
    late_s = LATE_S if run.rank == 1 else 0.0
    layers = [nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)]
    first, last = Slow(late_s * (slow == "compute")), Slow(backward_s=late_s * (slow == "backward"))
    model = nn.Sequential(first, *layers, last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Samples(late_s if slow == "data" else 0.0), batch_size=4 * run.world_size)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    losses: list[float] = []
    while len(losses) < steps:
        for x, y in loader:
            optimizer.zero_grad()
            losses.append(run.forward_backward(supervised(F.cross_entropy, model), x, y).item())
            optimizer.step()
            if len(losses) == steps:
                break
    groups = dist.distributed_c10d._world.pg_map if dist.is_initialized() else {}
    return losses, sum(getattr(group, "recorder", None) is not None for group in groups)
