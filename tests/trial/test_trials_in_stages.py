"""Later trials in a pipeline: a batch that shows a coupled loss is refused when it comes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.errors import UsageError
from shoal.testing import world


class Body(nn.Module):
    """Layers with statistics and noise, which a trial must leave as they were."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.2)
        self.second = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.second(self.drop(self.norm(self.first(x)).tanh()))
        return hidden


def trained(strategy: str, padded: bool, trials: bool = True) -> dict[str, Any]:
    """Take three steps; the second batch, and all after it, may have labels that are ignored."""
    run = shoal.init(strategy, precision="fp64", announce=lambda _: None, guards=trials)
    torch.manual_seed(0)
    body, head = Body().double(), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    parameters = [*body.parameters(), *head.double().parameters()]
    body, head, optimizer = run.prepare(body, head, torch.optim.SGD(parameters, 0.1))
    calls: list[float] = []

    def compute_loss(x: Tensor, y: Tensor) -> Tensor:
        calls.append(0.0)
        hidden = body(x + 0.1 * torch.randn_like(x))
        return F.cross_entropy(head(hidden), y) + 0.01 * hidden.square().mean()

    torch.manual_seed(1)
    found: dict[str, Any] = {"error": "", "losses": []}
    for step in range(3):
        x, y = torch.randn(16, 6).double(), torch.randint(0, 4, (16,))
        if padded and step > 0:
            y[-5:] = -100  # on the last data rank alone
        try:
            loss = run.forward_backward(compute_loss, *run.share((x, y)))
        except UsageError as error:
            return found | {"error": str(error)}
        found["losses"].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return found | {"calls": len(calls), **run.weights()}


def in_all_ways(strategies: tuple[str, ...]) -> list[tuple[dict[str, Any], ...]]:
    return [
        (trained(one, padded=False), trained(one, False, trials=False), trained(one, padded=True))
        for one in strategies
    ]


@pytest.mark.parametrize(
    ("ranks", "strategies"),
    [
        (2, ("pipeline=2,microbatches=2",)),
        pytest.param(2, ("pipeline=2,schedule=zbv,microbatches=4",), marks=pytest.mark.slow),
        pytest.param(2, ("pipeline=2,schedule=interleaved", "pipeline=2"), marks=pytest.mark.slow),
        pytest.param(4, ("pipeline=2,zero1", "pipeline=2,ddp"), marks=pytest.mark.slow),
    ],
)
def test_a_later_batch_that_couples_samples_is_refused_by_all_stages(
    ranks: int, strategies: tuple[str, ...]
) -> None:
    for found in world.run(ranks, in_all_ways, strategies):
        for strategy, (tried, plain, padded) in zip(strategies, found, strict=True):
            assert tried["error"] == plain["error"] == "", strategy
            for name, value in plain.items():  # to the bit, and the script's own counter too
                same = torch.equal if isinstance(value, Tensor) else lambda a, b: a == b
                assert same(value, tried[name]), (strategy, name)
            assert "compute_loss is no mean over samples" in padded["error"], strategy
            assert len(padded["losses"]) == 1, strategy
