"""Steps that call the model twice, its parts or methods, or take gradients inside the loss."""

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
    """Blocks, which are units, between two layers and a scalar, which are in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.head = nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def encode(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x * self.scale

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.encode(x))
        return scores


def twice(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """R-Drop: two calls, of which the second sees other inputs."""
    first, second = net(x), net(x.flip(1))
    return F.cross_entropy(first, y) + F.mse_loss(first, second)


def parts(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """A method, a part of the model, and a weight of the root; a unit alone, and not all units."""
    hidden = net.encode(x)
    penalty = (net.head.weight @ net.blocks[1](hidden).T).square().mean()
    return F.cross_entropy(net.head(hidden), y) + penalty


def some(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """One unit only, twice, and no call of the model."""
    hidden = net.blocks[2](net.blocks[2](net.stem(x)))
    return F.cross_entropy(net.head(hidden), y)


def penalised(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """Gradient penalty: a gradient of a gradient, and a call of the model after it."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    return F.cross_entropy(net(x), y) + gradient.square().sum(1).mean()


def forces(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """Forces only: the gradient is the output."""
    x = x.clone().requires_grad_()
    (force,) = torch.autograd.grad(net(x).logsumexp(1).sum(), x, create_graph=True)
    return (force[:, :4] - F.one_hot(y, 4)).square().mean()


def attacked(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """Adversarial training: inner gradients without a graph, then the step."""
    for _ in range(2):
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(net(x), y) * len(x), x)
        x = (x + 0.1 * gradient.sign()).detach()
    return F.cross_entropy(net(x), y)


def ungraded(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """A target of the model's own, without gradients, for rows that differ between ranks."""
    if y[0] > 1:
        with torch.no_grad():
            target = net(x).softmax(1)
        return F.cross_entropy(net(x), y) + (net(x).softmax(1) - target).abs().mean()
    return F.cross_entropy(net(x), y)


STEPS = (twice, parts, some, penalised, forces, attacked, ungraded)


def loader() -> DataLoader:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(14, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 4, (14,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=5)


def trained(strategy: str, names: list[str], accumulate: int = 1) -> dict[str, list[Any]]:
    """Return for each kind of step the losses, which gradients are None, and the weights."""
    results: dict[str, list[Any]] = {}
    for name in names:
        torch.manual_seed(0)
        run, net = shoal.init(strategy, accumulate=accumulate, **QUIET), Net().double()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        net, optimizer, batches = run.prepare(net, optimizer, loader())
        found: list[Any] = []
        for x, y in batches:
            optimizer.zero_grad()
            loss = run.forward_backward(partial(globals()[name], net), x, y)
            optimizer.step()
            found.append(loss.item())
        gradients = run.gradients()
        found.append([gradient is None for gradient in gradients.values()])
        results[name] = [*found, run.weights()]
    return results


def same(found: dict[str, list[Any]], expected: dict[str, list[Any]]) -> None:
    for name, (*losses, unused, weights) in expected.items():
        *their_losses, their_unused, their_weights = found[name]
        assert their_losses == pytest.approx(losses, rel=1e-10), name
        assert their_unused == unused, name
        for key, value in weights.items():
            distance = (their_weights[key] - value).abs().max()
            assert distance <= 1e-10 * value.abs().max(), (name, key)


@pytest.mark.parametrize(
    ("strategy", "ranks", "accumulate"),
    [
        ("zero1", 2, 1),
        ("zero3", 2, 1),
        ("zero2", 2, 2),
        ("recompute,zero3", 2, 1),
        pytest.param("zero1", 3, 2, marks=pytest.mark.slow),
        pytest.param("zero3,hybrid=2", 4, 1, marks=pytest.mark.slow),
    ],
)
def test_a_step_may_call_what_it_likes(strategy: str, ranks: int, accumulate: int) -> None:
    names = [step.__name__ for step in STEPS]
    if "recompute" in strategy:
        names = ["twice", "parts", "some"]
    expected = trained("single", names, accumulate)
    for found in world.run(ranks, trained, strategy, names, accumulate):
        same(found, expected)
