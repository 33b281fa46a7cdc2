"""Gradients that a script edits, graphs that it keeps, and penalties on weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.errors import UsageError
from shoal.testing import world
from tests.harness.in_turn import in_turn


def prepared(strategy: str, **options: Any) -> tuple[shoal.Run, nn.Module, Any]:
    torch.manual_seed(0)
    run = shoal.init(strategy, precision="fp64", announce=lambda _: None)
    layers = [nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 5)]
    model = nn.Sequential(*layers).double()
    return run, *run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, **options))


def batch(run: shoal.Run) -> Any:
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return run.share((x, torch.arange(12) % 5))


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)


def edited(strategy: str) -> dict[str, Tensor]:
    run, model, optimizer = prepared(strategy)
    for _ in range(2):
        optimizer.zero_grad()
        run.forward_backward(lambda x, y: F.cross_entropy(model(x), y), *batch(run))
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5).clamp_(-1e-3, 1e-3)
            parameter.grad *= 2
        optimizer.step()
    return run.weights()


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "pipeline=2"])
def test_edits_that_need_one_gradient_alone_are_exact(strategy: str) -> None:
    expected = edited("single")
    for found in world.run(2, edited, strategy):
        same(found, expected)


def decayed_by_hand(strategy: str) -> dict[str, Tensor]:
    """Add a weight decay to gradients while autograd records, as a loop of a script does."""
    run, model, optimizer = prepared(strategy, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        run.forward_backward(lambda x, y: F.cross_entropy(model(x), y), *batch(run))
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.add_(parameter, alpha=0.1)
        optimizer.step()
    return run.weights()


def test_a_weight_may_be_added_to_its_gradient_in_place() -> None:
    expected = decayed_by_hand("single")
    for found in world.run(2, decayed_by_hand, "ddp"):
        same(found, expected)


def edited_by_another() -> str:
    run, model, _ = prepared("pipeline=2")
    run.forward_backward(lambda x, y: F.cross_entropy(model(x), y), *batch(run))
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    with pytest.raises(UsageError) as error:
        torch.stack([gradient.norm() for gradient in gradients])
    return str(error.value)


def test_numbers_that_are_computed_from_gradients_are_refused_in_a_pipeline() -> None:
    assert "is not on this rank under pipeline=2" in world.run(2, edited_by_another)[1]


def kept_graph() -> bool:
    """Return whether a graph made before the call gives the gradients of one made inside."""
    run, model, _ = prepared("ddp")
    x = torch.ones(4, 8, dtype=torch.float64)
    run.forward_backward(lambda: model(x).mean(), rows=4)
    inside = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    kept = model(x).mean(1)
    run.forward_backward(lambda: kept.mean(), rows=4)
    return all(torch.allclose(p.grad, g) for p, g in zip(model.parameters(), inside, strict=True))


def test_a_graph_that_was_made_before_the_call_is_used_once() -> None:
    # In a process of its own: where torch has threads for devices, a trial uses up the graph.
    assert world.run(1, kept_graph)[0]


def penalised(strategy: str, in_the_loss: bool) -> dict[str, Tensor]:
    run, model, optimizer = prepared(strategy, weight_decay=0.0 if in_the_loss else 0.02)

    def compute_loss(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        if in_the_loss:
            loss = loss + 0.01 * torch.stack([p.pow(2).sum() for p in model.parameters()]).sum()
        return loss

    run.forward_backward(compute_loss, *batch(run))
    optimizer.step()
    return run.weights()


def refused_penalty() -> str:
    run, model, _ = prepared("zero3")

    def compute_loss(x: Tensor, y: Tensor) -> Tensor:
        penalty = sum((p.pow(2).sum() for p in model.parameters()), torch.zeros(()))
        return F.cross_entropy(model(x), y) + 0.01 * penalty

    with pytest.raises(UsageError) as error:
        run.forward_backward(compute_loss, *batch(run))
    return str(error.value)


def test_a_penalty_on_shards_is_refused_and_both_cures_train_it() -> None:
    for error in world.run(2, refused_penalty):
        assert "Use ddp" in error
        assert "weight_decay=2 * c of SGD" in error
    expected = penalised("single", in_the_loss=True)
    for results in world.run(2, in_turn, penalised, ("zero3", False), ("ddp", True)):
        for found in results:
            same(found, expected)


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16).double(), nn.Linear(16, 5).double()

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        hidden = torch.spmm(adjacency, self.first(x)).relu()
        return torch.spmm(adjacency, self.second(hidden))


def whole_graph(strategy: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    run, model = shoal.init(strategy, precision="fp64", announce=lambda _: None), Graph()
    optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))[1]
    x = torch.randn(20, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    adjacency, y = torch.eye(20, dtype=torch.float64).to_sparse(), torch.arange(20) % 5
    for _ in range(3):
        optimizer.zero_grad()
        run.forward_backward(lambda: F.cross_entropy(model(x, adjacency), y), rows=20)
        optimizer.step()
    return run.weights()


def test_a_sparse_tensor_may_go_between_stages() -> None:
    expected = whole_graph("single")
    for found in world.run(2, whole_graph, "pipeline=2"):
        same(found, expected)
