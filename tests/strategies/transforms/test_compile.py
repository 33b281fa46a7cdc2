"""torch.compile under strategies. Mostly slow: the first batch waits for a C++ compiler."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.config import read
from shoal.testing import world
from shoal.train import entry
from tests.harness.in_turn import in_turn


def train(out: Path, strategy: str, compiled: str) -> None:
    flags = {
        "model.name": "mlp",
        "train.max_steps": "5",
        "log.every": "1",
        "train.precision": "fp64",
    }
    flags |= {
        "model.compile": compiled,
        "strategy": strategy,
        "out": str(out),
        "log.tensorboard": "false",
    }
    entry.train(read("digits", [*flags.items()]).job)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", ["ddp", "zero2", "zero3,unit=Linear", "recompute,unit=Linear,zero3"]
)
def test_a_compiled_model_trains_as_a_plain_one(tmp_path: Path, strategy: str) -> None:
    losses = []
    for compiled in ("false", "true"):
        world.run(2, train, tmp_path / compiled, strategy, compiled, timeout_s=400)
        lines = (tmp_path / compiled / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)


def looped(is_compiled: bool) -> list[float]:
    """Train by losses of the loop, whose operators are watched; return them."""
    torch.manual_seed(0)
    run = shoal.init("ddp", announce=lambda _: None)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    data = TensorDataset(torch.randn(24, 6).double(), torch.randint(0, 3, (24,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, batch_size=4))
    called = torch.compile(model, backend="eager") if is_compiled else model
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        losses.append(run.backward(F.cross_entropy(called(x), y)).item())
        optimizer.step()
    return losses


def test_a_loop_may_call_a_compiled_model() -> None:
    plain, compiled = world.run(2, in_turn, looped, (False,), (True,))[0]
    assert compiled == pytest.approx(plain, rel=1e-10)
