"""Flows with tractable likelihoods."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.scripts.one_loss import OneLossScript, parts
from tests.scripts.samples import SAMPLES, built, loader, mlp, normal


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


class NormalisingFlow(OneLossScript):
    """The likelihood of a flow: every layer returns two tensors."""

    follows = "karpathy/pytorch-normalizing-flows"
    needs = ""

    def setup(self):
        return parts(
            nn.ModuleList(built(Coupling, seed=i) for i in range(3)),
            loader(normal(SAMPLES, 6)),
            lr=0.02,
        )

    def loss(self, model, x):
        volume = torch.zeros(len(x))
        for layer in model:
            x, change = layer(x)
            volume = volume + change
        return (0.5 * x.pow(2).sum(1) - volume).mean()


class ContinuousFlow(OneLossScript):
    """A neural differential equation with the exact trace of its Jacobian inside the loss."""

    follows = "rtqichen/torchdiffeq cnf"
    needs = "D"

    def setup(self):
        return parts(mlp(2, 8, 2), loader(normal(SAMPLES, 2)), lr=0.05)

    def loss(self, model, x):
        z, volume = x.clone().requires_grad_(), torch.zeros(len(x))
        for _ in range(3):
            speed = model(z)
            for i in range(2):
                (row,) = torch.autograd.grad(speed[:, i].sum(), z, create_graph=True)
                volume = volume + row[:, i] / 3
            z = z + speed / 3
        return (0.5 * z.pow(2).sum(1) - volume).mean()
