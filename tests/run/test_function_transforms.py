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
from tests.harness.in_turn import in_turn


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


def test_a_loss_with_a_gradient_of_each_sample_trains_as_on_one_device() -> None:
    expected = penalised("single")
    for results in world.run(2, in_turn, penalised, ("ddp",), ("server=1",)):
        for found in results:
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def refusal(strategy: str) -> str:
    with pytest.raises(StrategyRefused) as refused:
        penalised(strategy)
    return str(refused.value)


def test_where_a_model_is_divided_it_is_refused_by_its_true_reason() -> None:
    calls = ("tensor=2",), ("pipeline=2",), ("zero3",)
    for of_slices, of_stages, of_shards in world.run(2, in_turn, refusal, *calls):
        assert "does not go through the sum" in of_slices
        assert "other ranks hold layers" in of_stages
        assert "Use ddp" in of_shards
