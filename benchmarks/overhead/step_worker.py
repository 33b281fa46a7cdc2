"""One rank of a candidate of `step_parts`: takes so many steps whenever a line on stdin says so.

The answer is a line of JSON: the median time of a step in this turn, in seconds. Between two turns
the process sleeps in `readline`, so that candidates do not disturb one another.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from itertools import cycle
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import shoal

ROWS, BATCHES = 64, 8
"""Rows of a batch on each rank, and how many batches there are; all are fetched beforehand."""
Step = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("candidate", choices=("hand", "shoal", "unguarded"))
    parser.add_argument("--own-batches", action="store_true", help="Shoal knows no loader")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.candidate == "hand":
        step = hand_written()
    else:
        step = shoals(options.candidate == "shoal", options.own_batches)
    answer_turns(step)


def answer_turns(step: Step) -> None:
    """Take turns until stdin ends. Each line is a number of steps; every rank gets the same."""
    for line in sys.stdin:
        times_s = []
        for _ in range(int(line)):
            started_s = time.perf_counter()
            step()
            times_s.append(time.perf_counter() - started_s)
        print(json.dumps(median(times_s)), flush=True)


def mlp() -> nn.Module:
    """Return a model so small that nearly all of its step is overhead."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def samples(rows: int) -> tuple[Tensor, Tensor]:
    """Return so many random rows, and a label for each."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 64, generator=generator)
    return x, torch.randint(10, (rows,), generator=generator)


def own_batches() -> list[tuple[Tensor, Tensor]]:
    """Return the batches of a script without a loader."""
    x, y = samples(ROWS * BATCHES)
    return list(zip(x.split(ROWS), y.split(ROWS), strict=True))


def hand_written() -> Step:
    """Return PyTorch's own step: on several ranks with DistributedDataParallel, over `shoal`."""
    ranks = shoal.init(announce=lambda _: None).world  # makes the process group
    model = mlp()
    if ranks > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = cycle(own_batches())

    def step() -> object:
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def shoals(guards: bool, own: bool) -> Step:
    """Return Shoal's step. Args: own: the script makes the batches, so ranks do not know their
    sizes.
    """
    run = shoal.init(announce=lambda _: None, guards=guards)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(*samples(ROWS * BATCHES * run.world))
    run.prepare(model, optimizer)
    batches = own_batches() if own else list(run.prepare(DataLoader(data, ROWS * run.world)))
    batch_cycle = cycle(batches)

    def compute_loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    def step() -> object:
        x, y = next(batch_cycle)
        optimizer.zero_grad()
        loss = run.forward_backward(compute_loss, x, y)
        optimizer.step()
        return loss

    return step


if __name__ == "__main__":
    main()
