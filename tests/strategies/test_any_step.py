"""Steps that call the model twice, its parts or methods, or take gradients inside the loss."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from any_step import QUIET, Net, assert_same, loader, penalised, some, twice
from torch import Tensor, nn
from torch.utils.data import DataLoader

import shoal
from shoal.errors import LaunchError
from shoal.testing import world


def parts(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """A method, a part of the model, and a weight of the root; a unit alone, and not all units."""
    hidden = net.encode(x)
    penalty: Tensor = (net.head.weight @ net.blocks[1](hidden).T).square().mean()
    return F.cross_entropy(net.head(hidden), y) + penalty


def forces(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """Forces only: the gradient is the output."""
    x = x.clone().requires_grad_()
    (force,) = torch.autograd.grad(net(x).logsumexp(1).sum(), x, create_graph=True)
    distance: Tensor = (force[:, :4] - F.one_hot(y, 4)).square().mean()
    return distance


def attacked(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """Adversarial training: inner gradients without a graph, then the step."""
    for _ in range(2):
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(net(x), y) * len(x), x)
        x = (x + 0.1 * gradient.sign()).detach()
    return F.cross_entropy(net(x), y)


def ungraded(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """A target of the model's own, without gradients."""
    with torch.no_grad():
        target = net(x).softmax(1)
    distance: Tensor = (net(x).softmax(1) - target).abs().mean()
    return F.cross_entropy(net(x), y) + distance


STEPS = (twice, parts, some, penalised, forces, attacked, ungraded)


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
        assert_same(their_weights, weights, name)


@pytest.mark.parametrize(
    ("strategy", "ranks", "accumulate"),
    [
        pytest.param("ddp,bucket_mb=0.0001", 2, 1, marks=pytest.mark.slow),
        ("zero3", 2, 1),
        pytest.param("recompute,zero3", 2, 1, marks=pytest.mark.slow),
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


class Critic(nn.Module):
    """Two units and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        score: Tensor = self.head(self.body(x))
        return score


class Several:
    """A generator and a critic with an optimizer each, a frozen model, and what is called once."""

    def __init__(self, strategy: str) -> None:
        torch.manual_seed(0)
        self.run = shoal.init(strategy, **QUIET)
        self.make, self.critic = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5)), Critic()
        self.frozen = Net().requires_grad_(False)
        models = [model.double() for model in (self.make, self.critic, self.frozen)]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.5) for m in models[:2]]
        prepared = self.run.prepare(*models, *optimizers, loader())
        self.optimizers, self.batches = prepared[3:5], prepared[5]

    def criticise(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            made = self.make(x)
        between = (made + x).requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        loss: Tensor = self.critic(made).mean() - self.critic(x).mean() + penalty
        return loss

    def deceive(self, x: Tensor, y: Tensor) -> Any:
        made = self.make(x)
        labels = F.cross_entropy(self.frozen(made), y, reduction="sum")
        hidden = self.frozen.blocks[0](self.frozen.encode(made[y > 2]))
        labels = labels + hidden.square().sum()
        return shoal.counted(labels, (y > 0).sum()) + shoal.counted(
            -self.critic(made).sum(), len(y)
        )

    def sums(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"score": self.critic.head(self.critic.body(self.make(x))).sum()}

    def train(self) -> tuple[list[float], dict[str, float], dict[str, Tensor]]:
        losses = []
        of_make, of_critic = self.optimizers
        for x, y in self.batches:
            for compute_loss, optimizer in ((self.criticise, of_critic), (self.deceive, of_make)):
                of_make.zero_grad()
                of_critic.zero_grad()
                losses.append(self.run.forward_backward(compute_loss, x, y).item())
                with torch.no_grad():
                    self.make(x)  # between the passes and the step
                optimizer.step()
        with torch.no_grad():
            scores = self.critic(x), self.critic.body(x)
        assert all(score.requires_grad is False for score in scores)
        return losses, self.run.evaluate(self.sums, loader_of_five()), self.run.weights()


def loader_of_five() -> DataLoader:
    data: Any = loader().dataset
    return DataLoader(data, batch_size=3)


def several(strategy: str) -> tuple[list[float], dict[str, float], dict[str, Tensor]]:
    return Several(strategy).train()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_several_models_and_optimizers_take_turns(strategy: str) -> None:
    losses, sums, weights = several("single")
    for their_losses, their_sums, their_weights in world.run(2, several, strategy):
        assert their_losses == pytest.approx(losses, rel=1e-10)
        assert their_sums == pytest.approx(sums, rel=1e-10)
        assert_same(their_weights, weights)


def gradients_by_parameters(strategy: str) -> None:
    run = shoal.init(strategy, announce=lambda _: None)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def compute_loss(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        return loss + sum(slope.square().sum() for slope in slopes)

    run.forward_backward(compute_loss, torch.ones(2, 4).double())


def test_gradients_by_parameters_inside_of_the_loss_are_refused_by_name() -> None:
    with pytest.raises(LaunchError, match=r"takes a gradient by parameters .*Use zero1 or ddp"):
        world.run(2, gradients_by_parameters, "zero3")
