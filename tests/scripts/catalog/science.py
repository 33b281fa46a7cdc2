"""Physics, molecules and inner optimisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.scripts.one_loss import OneLossScript, parts
from tests.scripts.samples import SAMPLES, built, loader, mlp, normal
from tests.scripts.script import Script, weights


class Energy(nn.Module):
    """An energy of pairwise distances between the atoms of each molecule."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, positions: Tensor) -> Tensor:
        i, j = torch.triu_indices(positions.shape[1], positions.shape[1], 1)
        apart = (positions[:, i] - positions[:, j]).norm(dim=-1, keepdim=True)
        return self.pair(apart).sum((1, 2))


class Forces(OneLossScript):
    """Forces are the gradient of the energy; the loss takes both."""

    follows = "atomistic-machine-learning/schnetpack"
    needs = "D"

    def setup(self):
        return parts(
            built(Energy),
            loader(normal(SAMPLES, 4, 3), normal(SAMPLES, seed=1), normal(SAMPLES, 4, 3, seed=2)),
            lr=0.001,
        )

    def loss(self, model, positions, energy, forces):
        positions.requires_grad_()
        guess = model(positions)
        (slope,) = torch.autograd.grad(guess.sum(), positions, create_graph=True)
        return F.mse_loss(guess, energy) + 10 * F.mse_loss(-slope, forces)


class PhysicsInformed(Script):
    """A differential equation by second derivatives on points, and values on its boundary."""

    follows = "maziarraissi/PINNs"
    needs = "DN"

    @staticmethod
    def plain():
        model = mlp(1, 8, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)
        points, border = normal(7, 1), torch.tensor([[0.0], [1.0]])
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            x = points.clone().requires_grad_()
            u = model(x)
            (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
            loss = (second + u).pow(2).mean() + model(border).pow(2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = mlp(1, 8, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)
        points, border = normal(7, 1), torch.tensor([[0.0], [1.0]])
        model, optimizer = run.prepare(model, optimizer)

        def compute_loss(points):
            x = points.clone().requires_grad_()
            u = model(x)
            (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
            return (second + u).pow(2).mean() + model(border).pow(2).mean()

        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, run.share(points))
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class PhysicsLbfgs(Script):
    """The same equation by L-BFGS, which calls a closure several times in each step."""

    follows = "maziarraissi/PINNs, after Adam"
    needs = "DNO"

    @staticmethod
    def plain():
        model = mlp(1, 8, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        points, border = normal(7, 1), torch.tensor([[0.0], [1.0]])

        def closure():
            optimizer.zero_grad()
            x = points.clone().requires_grad_()
            u = model(x)
            (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            loss = (slope - u).pow(2).mean() + (model(border) - 1).pow(2).mean()
            loss.backward()
            return loss

        losses = [optimizer.step(closure) for _ in range(3)]
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = mlp(1, 8, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        points, border = normal(7, 1), torch.tensor([[0.0], [1.0]])
        model, optimizer = run.prepare(model, optimizer)

        def compute_loss(points):
            x = points.clone().requires_grad_()
            u = model(x)
            (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            return (slope - u).pow(2).mean() + (model(border) - 1).pow(2).mean()

        def closure():
            optimizer.zero_grad()
            return run.forward_backward(compute_loss, run.share(points))

        losses = [optimizer.step(closure) for _ in range(3)]
        return losses, run.weights()


class MetaLearning(OneLossScript):
    """Inner steps on one half of each task by functional_call, the loss on the other half."""

    follows = "learnables/learn2learn MAML"
    needs = "DX"

    def setup(self):
        return parts(mlp(2, 8, 1), loader(normal(SAMPLES, 6, 2), normal(SAMPLES, 6, 1, seed=1)))

    def loss(self, model, x, y):
        loss = torch.zeros(())
        for inputs, wanted in zip(x, y, strict=True):
            fast = dict(model.named_parameters())
            error = F.mse_loss(torch.func.functional_call(model, fast, inputs[:3]), wanted[:3])
            slopes = torch.autograd.grad(error, list(fast.values()), create_graph=True)
            fast = {n: p - 0.1 * g for (n, p), g in zip(fast.items(), slopes, strict=True)}
            after = torch.func.functional_call(model, fast, inputs[3:])
            loss = loss + F.mse_loss(after, wanted[3:]) / len(x)
        return loss
