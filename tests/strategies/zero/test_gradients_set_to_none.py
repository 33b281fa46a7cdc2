"""A loop may set gradients to None, or to zero, before its forward pass or between it and the
backward pass: `loss = ...; model.zero_grad(); run.backward(loss)`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.testing import world
from tests.harness.in_turn import in_turn


class Net(nn.Module):
    """Parameters in units, in none, and one without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        blocks = (nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(6, 3)
        self.gain = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden) * self.gain  # type: ignore[no-any-return]


def remove(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def zero_a_part(model: nn.Module) -> None:
    model.head.zero_grad()
    model.embedding.zero_grad(set_to_none=False)


WAYS: dict[str, Callable[[nn.Module], None]] = {
    "zero_grad": lambda model: model.zero_grad(),
    "to zero": lambda model: model.zero_grad(set_to_none=False),
    "by hand": remove,
    "a part": zero_a_part,
}


def trained(strategy: str, way: str, is_between: bool) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return weights and norms of the gradients, which are clipped by them."""
    torch.manual_seed(0)
    run = shoal.init(strategy, announce=lambda _: None)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data = TensorDataset(torch.arange(24) % 9, torch.arange(24) % 3)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, batch_size=8))
    norms = []
    for x, y in loader:
        if not is_between:
            WAYS[way](model)
        loss = F.cross_entropy(model(x), y)
        if is_between:
            WAYS[way](model)
        run.backward(loss)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.3).clone())
        optimizer.step()
    return run.weights(), norms


@pytest.mark.parametrize(
    "strategy", ["zero3", *(pytest.param(s, marks=pytest.mark.slow) for s in ("zero1", "zero2"))]
)
def test_gradients_of_shards_follow_those_of_the_model(strategy: str) -> None:
    calls = [(strategy, way, is_between) for way in WAYS for is_between in (False, True)]
    expected = [trained("single", way, is_between) for _, way, is_between in calls]
    for found in world.run(2, in_turn, trained, *calls):
        for call, each, right in zip(calls, found, expected, strict=True):
            torch.testing.assert_close(each, right, rtol=1e-10, atol=1e-12, msg=str(call))
