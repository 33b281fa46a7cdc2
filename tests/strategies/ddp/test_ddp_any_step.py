"""Steps of every data strategy that call the model twice, its parts, or differentiate inside."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.testing import world

QUIET: dict[str, Any] = {"announce": lambda _: None, "precision": "fp64"}


class Net(nn.Module):
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


def twice(net: Net, x: Tensor, y: Tensor) -> Tensor:
    first, second = net(x), net(x.flip(1))
    return F.cross_entropy(first, y) + F.mse_loss(first, second)


def parts(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """A method, a weight in a function, a penalty on weights, and no call of the model."""
    penalty = torch.stack([p.square().sum() for p in net.head.parameters()]).sum()
    return F.cross_entropy(net.encode(x) @ net.head.weight.T, y) + 0.01 * penalty


def penalised(net: Net, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    return F.cross_entropy(net(x), y) + gradient.square().sum(1).mean()


STEPS = (twice, parts, penalised)


def loader() -> DataLoader:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(14, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 4, (14,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=5)


def trained(strategy: str, accumulate: int) -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    """Return losses and weights for each kind of step. Two optimizers share the model."""
    results = {}
    for step in STEPS:
        torch.manual_seed(0)
        run, net = shoal.init(strategy, accumulate=accumulate, **QUIET), Net().double()
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
            for key, value in weights.items():
                assert (found[name][1][key] - value).abs().max() <= 1e-10 * value.abs().max(), key
