"""Transforms of torch.func around calls of a model, as for a gradient penalty of each sample."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from minimal_script import parts
from torch import Tensor, nn

import shoal
from shoal.errors import StrategyRefused
from shoal.testing import world


def penalised(strategy: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    run = shoal.init(strategy, announce=lambda _: None)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    model, optimizer, loader = run.prepare(*parts(net))

    def compute_loss(x: Tensor, y: Tensor) -> Tensor:
        slopes = torch.func.vmap(torch.func.grad(lambda row: model(row[None]).sum()))(x)
        return F.cross_entropy(model(x), y) + 0.1 * slopes.square().sum(1).mean()

    for x, y in loader:
        run.forward_backward(compute_loss, x, y)
        optimizer.step()
        optimizer.zero_grad()
    return run.weights()


@pytest.mark.parametrize("strategy", ["ddp", "server=1"])
def test_a_loss_with_a_gradient_of_each_sample_trains_as_on_one_device(strategy: str) -> None:
    expected = penalised("single")
    for found in world.run(2, penalised, strategy):
        for name, value in expected.items():
            assert torch.allclose(found[name], value, rtol=1e-10, atol=1e-12), name


def refusal(strategy: str) -> str:
    with pytest.raises(StrategyRefused) as refused:
        penalised(strategy)
    return str(refused.value)


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("tensor=2", "does not go through the sum"),
        ("pipeline=2", "other ranks hold layers"),
        ("zero3", "Use ddp"),
    ],
)
def test_where_a_model_is_divided_it_is_refused_by_its_true_reason(
    strategy: str, words: str
) -> None:
    for message in world.run(2, refusal, strategy):
        assert words in message
