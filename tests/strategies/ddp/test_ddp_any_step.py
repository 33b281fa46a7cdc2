"""Steps of every data strategy that call the model twice, its parts, or differentiate inside."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from any_step import QUIET, assert_same, loader, penalised, twice
from torch import Tensor, nn

import shoal
from shoal.testing import world


class TwoLayers(nn.Module):
    """Two layers that are used, and one between them that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 6)
        self.spare = nn.Linear(6, 6)
        self.head = nn.Linear(6, 4)

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.stem(x))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.encode(x))
        return scores


def parts(net: TwoLayers, x: Tensor, y: Tensor) -> Tensor:
    """A method, a weight in a function, a penalty on weights, and no call of the model."""
    penalty = torch.stack([p.square().sum() for p in net.head.parameters()]).sum()
    return F.cross_entropy(net.encode(x) @ net.head.weight.T, y) + 0.01 * penalty


STEPS = (twice, parts, penalised)


def trained(strategy: str, accumulate: int) -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    """Return losses and weights for each kind of step. Two optimizers share the model."""
    results = {}
    for step in STEPS:
        torch.manual_seed(0)
        run, net = shoal.init(strategy, accumulate=accumulate, **QUIET), TwoLayers().double()
        of_stem = torch.optim.SGD([*net.stem.parameters(), *net.spare.parameters()], lr=0.1)
        of_head = torch.optim.SGD(net.head.parameters(), lr=0.2, momentum=0.9)
        net, of_stem, of_head, batches = run.prepare(net, of_stem, of_head, loader())
        losses = []
        for x, y in batches:
            losses.append(run.forward_backward(partial(step, net), x, y).item())
            for optimizer in (of_stem, of_head):
                optimizer.step()
                optimizer.zero_grad()
        results[step.__name__] = losses, run.weights()
    return results


@pytest.mark.parametrize(
    ("strategy", "accumulate"),
    [
        pytest.param("ddp", 1, marks=pytest.mark.slow),
        ("ddp,bucket_mb=0.0001", 1),
        pytest.param("ddp,bucket_mb=0.0001", 2, marks=pytest.mark.slow),
        ("local=1", 1),
    ],
)
def test_a_step_may_call_what_it_likes(strategy: str, accumulate: int) -> None:
    expected = trained("single", accumulate)
    for found in world.run(2, trained, strategy, accumulate):
        for name, (losses, weights) in expected.items():
            assert found[name][0] == pytest.approx(losses, rel=1e-10), name
            assert_same(found[name][1], weights, name)
