"""Optimizers that wrap another one, and share its groups, train as on one device."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import shoal
from shoal.testing import world


class Lookahead(Optimizer):
    """Every second step goes half of the way; as written before torch's optimizers had hooks."""

    elementwise = True

    def __init__(self, optimizer: Optimizer) -> None:  # without super().__init__(), as usual
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.state: Any = defaultdict(dict)
        self.steps = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)
        for group in self.param_groups:
            for fast in group["params"]:
                slow = self.state[fast].setdefault("slow", fast.data.clone())
                if self.steps % 2:
                    slow += (fast.data - slow) * 0.5
                    fast.data.copy_(slow)
        self.steps += 1


def begun() -> tuple[nn.Module, Lookahead, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return model, optimizer, torch.arange(32.0, dtype=torch.float64).sin().reshape(8, 4)


def plain() -> dict[str, Tensor]:
    model, optimizer, x = begun()
    for _ in range(5):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model.state_dict()


def trained(strategy: str) -> dict[str, Tensor]:
    run = shoal.init(strategy, precision="fp64", announce=lambda _: None)
    model, optimizer, x = begun()
    model, optimizer = run.prepare(model, optimizer)
    for _ in range(5):
        optimizer.zero_grad()
        run.forward_backward(lambda x: model(x).square().mean(), run.share(x))
        optimizer.step()
    return run.weights()


def trained_by(strategies: list[str]) -> dict[str, dict[str, Tensor]]:
    return {strategy: trained(strategy) for strategy in strategies}


@pytest.mark.parametrize(
    "strategies",
    [
        ["zero3", "tensor=2"],
        pytest.param(["ddp", "zero1", "zero2", "pipeline=2"], marks=pytest.mark.slow),
    ],
)
def test_an_optimizer_around_another_one_steps_as_on_one_device(strategies: list[str]) -> None:
    expected = plain()
    for found in world.run(2, trained_by, strategies):
        for strategy, weights in found.items():
            torch.testing.assert_close(
                weights,
                expected,
                rtol=1e-10,
                atol=1e-12,
                msg=lambda text, s=strategy: f"{s}: {text}",
            )
