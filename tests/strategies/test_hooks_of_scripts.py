"""Hooks of the script on parameters act on the gradient of the whole batch, as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.errors import StrategyRefused
from shoal.testing import world


def halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def trained(strategy: str, accumulate: int = 1) -> tuple[list[float], dict[str, Tensor], int]:
    """Train with hooks that are no sums over rows; one ends, one comes after `prepare`."""
    run = shoal.init(strategy, precision="fp64", accumulate=accumulate, announce=lambda _: None)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).double()
    seen: list[float] = []
    model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    ends = model[1].weight.register_hook(lambda gradient: gradient / (1 + gradient.norm()))
    model[2].bias.register_hook(lambda _: seen.append(0.0))
    model[2].weight.register_post_accumulate_grad_hook(halve)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    model[3].bias.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
    torch.manual_seed(1)
    batches = [(torch.randn(8, 8).double(), torch.randint(0, 8, (8,))) for _ in range(4)]
    losses = []
    for step, batch in enumerate(batches):
        if step == 2:
            ends.remove()
        x, y = run.share(batch)
        loss = run.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
        losses.append(loss.item())
        if step != 1:  # the third step adds up two calls
            optimizer.step()
            optimizer.zero_grad()
    return losses, {name: value.clone() for name, value in run.weights().items()}, len(seen)


def trained_by_all(strategies: tuple[tuple[str, int], ...]) -> list[Any]:
    return [trained(*strategy) for strategy in strategies]


@pytest.mark.parametrize(
    ("ranks", "strategies"),
    [
        (2, (("zero3", 1), ("pipeline=2", 1))),
        pytest.param(2, (("ddp", 1), ("ddp", 2)), marks=pytest.mark.slow),
        pytest.param(2, (("zero1", 2), ("zero2", 1), ("recompute,ddp", 1)), marks=pytest.mark.slow),
        pytest.param(2, (("pipeline=2,schedule=zbv", 1),), marks=pytest.mark.slow),
        pytest.param(4, (("pipeline=2,zero1", 1),), marks=pytest.mark.slow),
    ],
)
def test_hooks_on_parameters_see_the_gradient_of_the_whole_batch(
    ranks: int, strategies: tuple[tuple[str, int], ...]
) -> None:
    losses, weights, _ = trained("single")
    for found in world.run(ranks, trained_by_all, strategies):
        for strategy, (their_losses, their_weights, calls) in zip(strategies, found, strict=True):
            assert their_losses == pytest.approx(losses, rel=1e-10), strategy
            for name, value in weights.items():
                torch.testing.assert_close(
                    their_weights[name], value, rtol=1e-10, atol=1e-13, msg=f"{strategy} {name}"
                )
            assert calls <= 4, strategy  # in a pipeline on the rank of the layer alone


def refused_by_servers() -> list[str]:
    return [refusal(clamps) for clamps in (True, False)]


def refusal(clamps: bool) -> str:
    run = shoal.init("server=1", precision="fp64", announce=lambda _: None)
    model = nn.Linear(4, 4).double()
    if clamps:
        model.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    else:
        model.bias.register_post_accumulate_grad_hook(halve)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    x = run.share(torch.ones(4, 4).double())
    with pytest.raises(StrategyRefused) as caught:
        run.forward_backward(lambda x: model(x).square().mean(), x)
    return str(caught.value)


@pytest.mark.slow
def test_servers_refuse_hooks_that_need_the_gradient_of_the_whole_batch() -> None:
    for clamping, halving in world.run(2, refused_by_servers):
        assert "does not give for a sum what it gives for the parts" in clamping
        assert "hook on its accumulated gradient" in halving
