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
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import shoal

BATCHES = 8
"""Batches of each rank; all are fetched beforehand."""
Step = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("candidate", choices=("hand", "shoal", "unguarded"))
    parser.add_argument("--network", choices=NETWORKS, default="mlp")
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--own-batches", action="store_true", help="Shoal knows no loader")
    options = parser.parse_args()
    torch.set_num_threads(1)
    network = NETWORKS[options.network]
    if options.candidate == "hand":
        step = hand_written(network)
    else:
        guards = options.candidate == "shoal"
        step = shoals(network, options.strategy, guards, options.own_batches)
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


class Network(NamedTuple):
    """A model, and the data of its benchmark.

    Attributes:
        build: makes it.
        shape: of a sample.
        tokens: how many a sample may have; 0 for real numbers.
        rows: of a batch of one rank.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    tokens: int = 0
    rows: int = 64

    def model(self) -> nn.Module:
        """Return the model, with the same values for everyone."""
        torch.manual_seed(0)
        return self.build()

    def samples(self, rows: int) -> tuple[Tensor, Tensor]:
        """Return so many random rows, and a label for each."""
        generator = torch.Generator().manual_seed(0)
        if self.tokens:
            x = torch.randint(self.tokens, (rows, *self.shape), generator=generator)
        else:
            x = torch.randn(rows, *self.shape, generator=generator)
        return x, torch.randint(10, (rows,), generator=generator)

    def own_batches(self) -> list[tuple[Tensor, Tensor]]:
        """Return the batches of a script without a loader."""
        x, y = self.samples(self.rows * BATCHES)
        return list(zip(x.split(self.rows), y.split(self.rows), strict=True))


def mlp(width: int) -> nn.Module:
    """Return three layers; with a width of 64 nearly all of a step is overhead."""
    first, second = nn.Linear(64, width), nn.Linear(width, width)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(width, 10))


def cnn() -> nn.Module:
    """Return a model that computes much with few parameters."""
    first, second = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 32, 3, 2, 1)
    pooled = (nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return nn.Sequential(first, nn.ReLU(), second, *pooled)


class Transformer(nn.Module):
    """Four blocks of width 256, and a class for each text: 3.4 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 256)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
            for _ in range(4)
        )
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (rows, 10) of tokens (rows, length)."""
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.mean(1))
        return logits


NETWORKS = {
    "mlp": Network(lambda: mlp(64), (64,)),
    "wide-mlp": Network(lambda: mlp(1400), (64,)),
    "cnn": Network(cnn, (3, 32, 32)),
    "transformer": Network(Transformer, (32,), tokens=1000, rows=8),
}


def hand_written(network: Network) -> Step:
    """Return PyTorch's own step: on several ranks with DistributedDataParallel, over `shoal`."""
    ranks = shoal.init(announce=lambda _: None).world_size  # makes the process group
    model = network.model()
    if ranks > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = cycle(network.own_batches())

    def step() -> object:
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def shoals(network: Network, strategy: str, guards: bool, own: bool) -> Step:
    """Return Shoal's step.

    Args: own: the script makes the batches, so ranks do not know their sizes.
    """
    run = shoal.init(strategy, announce=lambda _: None, guards=guards)
    model = network.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    share = network.rows * run.mesh.data.size
    data = TensorDataset(*network.samples(share * BATCHES))
    model, optimizer = run.prepare(model, optimizer)
    batches = network.own_batches() if own else list(run.prepare(DataLoader(data, share)))
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
