"""Hooks of the script on parameters act on each row alike, as on one device, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.errors import StrategyRefused
from shoal.testing import world
from tests.harness.in_turn import in_turn


def halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


class RestFor:
    """A hook that lets a parameter rest in the first steps."""

    def __init__(self, steps: int) -> None:
        self.steps, self.calls = steps, 0

    def __call__(self, gradient: Tensor) -> Tensor:
        self.calls += 1
        return gradient * (self.calls > self.steps)


def trained(strategy: str) -> list[float]:
    """Train with a mask, with a hook that only looks, and with one that counts."""
    run = shoal.init(strategy, precision="fp64", announce=lambda _: None)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).double()
    mask, batch = (torch.rand(8, 8) > 0.5).double(), (torch.randn(8, 8).double(), torch.arange(8))
    seen: list[Tensor] = []
    model[0].weight.register_hook(lambda gradient: gradient * mask)
    model[2].bias.register_hook(seen.append)
    model[1].weight.register_hook(RestFor(2))
    x, y = run.share(batch)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    losses = []
    for _ in range(5):
        loss = run.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("server=1", marks=pytest.mark.slow)])
def test_hooks_that_act_on_each_row_alike_are_exact(strategy: str) -> None:
    expected = trained("single")
    for losses in world.run(2, trained, strategy):
        assert losses == pytest.approx(expected, rel=1e-10)


HOOKS: dict[str, Callable[[nn.Linear], Any]] = {
    "clamp": lambda layer: layer.weight.register_hook(lambda g: g.clamp(-0.01, 0.01)),
    "high bound": lambda layer: layer.weight.register_hook(lambda g: g.clamp(-50, 50)),
    "threshold": lambda layer: layer.weight.register_hook(lambda g: g * (g.abs() > 0.01)),
    "accumulated": lambda layer: layer.weight.register_post_accumulate_grad_hook(halve),
    "mask": lambda layer: layer.weight.register_hook(lambda g: g * 0.5),
}


def refusal(strategy: str, kind: str, when: str) -> str:
    run = shoal.init(strategy, precision="fp64", announce=lambda _: None)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = run.share(torch.ones(4, 4).double())
    with pytest.raises(StrategyRefused) as caught:  # noqa: PT012 (in prepare, or in the step)
        for layer in model if when == "before" else ():
            HOOKS[kind](layer)
        model, _ = run.prepare(model, optimizer)
        for layer in model if when == "after" else ():
            HOOKS[kind](layer)
        run.forward_backward(lambda x: model(x).square().mean(), x)
    return str(caught.value)


def test_hooks_that_need_the_gradient_of_the_whole_batch_are_refused_with_the_cure() -> None:
    cases = [
        ("ddp", "clamp", "after"),
        ("ddp", "high bound", "after"),
        ("ddp", "threshold", "after"),
        ("ddp", "accumulated", "before"),
        ("zero3", "mask", "before"),
        ("zero3", "mask", "after"),
        ("pipeline=2", "clamp", "before"),
    ]
    for found in world.run(2, in_turn, refusal, *cases):
        for text in found:
            assert "0.weight has a hook" in text or "1.weight has a hook" in text
            assert "run.clip_gradients(max_norm)" in text
