"""Optimizers that step shards: of sparse gradients, and of rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from any_step import QUIET, Net, assert_same, loader
from torch import Tensor, nn

import shoal
from shoal.errors import StrategyRefused
from shoal.testing import world


class Bags(nn.Module):
    """Embeddings with sparse gradients: a bag in the root, and rows in a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(9, 5, sparse=True, mode="sum")
        self.blocks = nn.ModuleList([nn.Embedding(9, 5, sparse=True), nn.Linear(5, 4)])

    def forward(self, x: Tensor) -> Tensor:
        rows = (x.abs() * 3).long().clamp(max=8)
        hidden = self.bag(rows) + self.blocks[0](rows[:, 0])
        scores: Tensor = self.blocks[1](hidden)
        return scores


def with_rows(strategy: str, optimizer_class: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    run = shoal.init(strategy, **QUIET)
    net = (Bags() if optimizer_class is torch.optim.SGD else Net()).double()
    optimizer = optimizer_class(net.parameters(), lr=0.1)
    net, optimizer, batches = run.prepare(net, optimizer, loader())
    for x, y in batches:
        optimizer.zero_grad()
        run.forward_backward(lambda x, y: F.cross_entropy(net(x), y), x, y)
        optimizer.step()
    return run.weights()


@pytest.mark.parametrize("strategy", [pytest.param("zero1", marks=pytest.mark.slow), "zero3"])
def test_sparse_gradients_are_stepped_as_on_one_device(strategy: str) -> None:
    expected = with_rows("single", torch.optim.SGD)
    for found in world.run(2, with_rows, strategy, torch.optim.SGD):
        assert_same(found, expected)


def steps_rows() -> str:
    run, bags = shoal.init("zero2", **QUIET), nn.ModuleList([nn.EmbeddingBag(9, 5, sparse=True)])
    optimizer = torch.optim.SparseAdam([*bags.parameters()])
    with pytest.raises(StrategyRefused) as refusal:
        run.prepare(bags, optimizer, loader())
    return str(refusal.value)


def test_an_optimizer_of_sparse_gradients_is_refused() -> None:
    for said in world.run(2, steps_rows):
        assert "SparseAdam cannot step the shards of 0.weight" in said
