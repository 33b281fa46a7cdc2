"""Optimizers that step shards: sparse gradients, flattened gradients, rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_zero_any_step import QUIET, Net, loader
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


class FlatStep(torch.optim.Optimizer):
    """An optimizer of a user's own: one step along the flattened gradient, of a fixed length."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        used = [p for p in group["params"] if p.grad is not None]
        flat = torch.cat([p.grad.reshape(-1) for p in used])
        for p in used:
            p.sub_(p.grad / flat.norm(), alpha=group["lr"])


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


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_sparse_gradients_are_stepped_as_on_one_device(strategy: str) -> None:
    expected = with_rows("single", torch.optim.SGD)
    for found in world.run(2, with_rows, strategy, torch.optim.SGD):
        for key, value in expected.items():
            assert (found[key] - value).abs().max() <= 1e-10 * value.abs().max(), key


class OwnRows(FlatStep):
    """The same along the rows that this rank holds."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        used = [p for p in group["params"] if p.grad is not None]
        held = [(_held(p), _held(p.grad)) for p in used]
        flat = torch.cat([gradient.reshape(-1) for _, gradient in held])
        for parameter, gradient in held:
            parameter.sub_(gradient / flat.norm(), alpha=group["lr"])


def _held(tensor: Any) -> Tensor:
    held: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return held


def flattening_refused(strategy: str, kind: Any) -> str:
    with pytest.raises(StrategyRefused) as refusal:
        with_rows(strategy, kind)
    return str(refusal.value)


def flattened(strategy: str) -> tuple[dict[str, Tensor], str]:
    """Return what an optimizer trains that flattens shards, and why one of own rows is refused."""
    return with_rows(strategy, FlatStep), flattening_refused(strategy, OwnRows)


@pytest.mark.slow
def test_an_optimizer_that_fails_on_uneven_shards_is_refused_before_it_does() -> None:
    for said in world.run(3, flattening_refused, "zero3", FlatStep):
        assert "FlatStep cannot step the shards of stem.weight" in said
        assert "and with sharded ones it fails (RuntimeError: " in said


def test_an_optimizer_that_flattens_all_gradients_steps_shards_as_whole_tensors() -> None:
    expected = with_rows("single", FlatStep)
    for found, said in world.run(2, flattened, "zero1"):
        for key, value in expected.items():
            assert (found[key] - value).abs().max() <= 1e-10 * value.abs().max(), key
        assert "OwnRows cannot step the shards of stem.weight" in said
        assert "on two halves of a small matrix" in said


def steps_rows() -> str:
    run, bags = shoal.init("zero2", **QUIET), nn.ModuleList([nn.EmbeddingBag(9, 5, sparse=True)])
    optimizer = torch.optim.SparseAdam([*bags.parameters()])
    with pytest.raises(StrategyRefused) as refusal:
        run.prepare(bags, optimizer, loader())
    return str(refusal.value)


def test_an_optimizer_of_sparse_gradients_is_refused() -> None:
    for said in world.run(2, steps_rows):
        assert "SparseAdam cannot step the shards of 0.weight" in said
