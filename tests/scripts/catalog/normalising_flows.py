"""Flows with tractable likelihoods."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.scripts.samples import SAMPLES, built, loader, mlp, normal, sgd
from tests.scripts.script import Script, weights


class Coupling(nn.Module):
    """An invertible layer: returns the image of x, and the log-determinant for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.chunk(2, 1)
        scale, shift = self.net(a).chunk(2, 1)
        scale = scale.tanh()
        return torch.cat([b * scale.exp() + shift, a], 1), scale.sum(1)


class NormalisingFlow(Script):
    """The likelihood of a flow: every layer returns two tensors."""

    follows = "karpathy/pytorch-normalizing-flows"
    needs = ""

    @staticmethod
    def plain():
        model = nn.ModuleList(built(Coupling, seed=i) for i in range(3))
        optimizer = sgd(model.parameters(), 0.02)
        data = loader(normal(SAMPLES, 6))
        losses = []
        for (x,) in data:
            optimizer.zero_grad()
            volume = torch.zeros(len(x))
            for layer in model:
                x, change = layer(x)
                volume = volume + change
            loss = (0.5 * x.pow(2).sum(1) - volume).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = nn.ModuleList(built(Coupling, seed=i) for i in range(3))
        optimizer = sgd(model.parameters(), 0.02)
        data = loader(normal(SAMPLES, 6))
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x):
            volume = torch.zeros(len(x))
            for layer in model:
                x, change = layer(x)
                volume = volume + change
            return (0.5 * x.pow(2).sum(1) - volume).mean()

        losses = []
        for (x,) in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class ContinuousFlow(Script):
    """A neural differential equation with the exact trace of its Jacobian inside the loss."""

    follows = "rtqichen/torchdiffeq cnf"
    needs = "D"

    @staticmethod
    def plain():
        model = mlp(2, 8, 2)
        optimizer = sgd(model.parameters(), 0.05)
        data = loader(normal(SAMPLES, 2))
        losses = []
        for (x,) in data:
            optimizer.zero_grad()
            z, volume = x.clone().requires_grad_(), torch.zeros(len(x))
            for _ in range(3):
                speed = model(z)
                for i in range(2):
                    (row,) = torch.autograd.grad(speed[:, i].sum(), z, create_graph=True)
                    volume = volume + row[:, i] / 3
                z = z + speed / 3
            loss = (0.5 * z.pow(2).sum(1) - volume).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = mlp(2, 8, 2)
        optimizer = sgd(model.parameters(), 0.05)
        data = loader(normal(SAMPLES, 2))
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x):
            z, volume = x.clone().requires_grad_(), torch.zeros(len(x))
            for _ in range(3):
                speed = model(z)
                for i in range(2):
                    (row,) = torch.autograd.grad(speed[:, i].sum(), z, create_graph=True)
                    volume = volume + row[:, i] / 3
                z = z + speed / 3
            return (0.5 * z.pow(2).sum(1) - volume).mean()

        losses = []
        for (x,) in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()
