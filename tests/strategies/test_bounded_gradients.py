"""Gradients that a hook bounds on their way back are bounded as on one device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import ShoalError
from shoal.testing import world


class Clamp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def,override]
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:  # type: ignore[no-untyped-def,override]
        return gradient.clamp(-0.01, 0.01)


class Bounded(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.tanh(self.first(x)))
        if self.kind == "function":
            x = Clamp.apply(x)
        elif x.requires_grad and self.kind == "hook":
            x.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        elif x.requires_grad:  # of all rows; it does not act on the first batch
            x.register_hook(lambda gradient: gradient / gradient.norm().clamp(min=10.0))
        return self.last(x)


def trained(
    strategy: str, accumulate: int, kind: str, counted: bool
) -> tuple[list[float], dict[str, Tensor]] | str:
    run = shoal.init(strategy, precision="fp64", accumulate=accumulate, announce=lambda _: None)
    torch.manual_seed(0)
    model = Bounded(kind).double()
    data = TensorDataset(torch.randn(11, 6).double(), torch.randint(3, (11,)))
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, 7))

    def compute_loss(x: Tensor, y: Tensor) -> object:
        if not counted:
            return F.cross_entropy(model(x), y)
        y = y.masked_fill(y == 2, -100)
        return shoal.counted(F.cross_entropy(model(x), y, reduction="sum"), (y >= 0).sum())

    losses = []
    try:
        for _ in range(2):
            for x, y in loader:
                losses.append(run.forward_backward(compute_loss, x, y).item())
                optimizer.step()
                optimizer.zero_grad()
    except ShoalError as error:
        return str(error)
    return losses, run.weights()


@pytest.mark.parametrize(
    ("strategy", "accumulate", "kind", "counted"),
    [
        ("ddp", 1, "hook", True),
        ("ddp", 2, "function", False),
        ("zero3", 1, "hook", False),
        ("tensor=2,ddp", 1, "function", True),
        ("pipeline=2,cuts=last", 1, "hook", False),
        pytest.param("tensor=2,ddp", 2, "function", False, marks=pytest.mark.slow),
        pytest.param("tensor=2,zero3", 1, "function", False, marks=pytest.mark.slow),
        pytest.param("pipeline=2,ddp", 1, "function", False, marks=pytest.mark.slow),
        pytest.param("zero1", 1, "function", True, marks=pytest.mark.slow),
        pytest.param("server=1", 1, "hook", False, marks=pytest.mark.slow),
    ],
)
def test_bounds_of_gradients_of_activations_are_those_of_one_device(
    strategy: str, accumulate: int, kind: str, counted: bool
) -> None:
    expected = trained("single", 1, kind, counted)
    num_ranks = 4 if "=2," in strategy and "cuts" not in strategy else 2
    for found in world.run(num_ranks, trained, strategy, accumulate, kind, counted):
        assert found[0] == pytest.approx(expected[0], rel=1e-10)
        for name, value in expected[1].items():
            torch.testing.assert_close(found[1][name], value, rtol=1e-10, atol=1e-13)


def test_a_bound_of_several_rows_is_refused_before_it_acts() -> None:
    for text in world.run(2, trained, "ddp", 1, "norm", False):
        assert "bounds gradients of activations by those of several rows" in text


def test_a_bounded_sum_in_micro_batches_is_refused_with_the_cure() -> None:
    for text in world.run(2, trained, "ddp", 2, "hook", True):
        assert "Use accumulate=1 and no pipeline, or return a mean" in text
