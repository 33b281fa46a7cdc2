"""Inputs moved against the model."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.scripts.one_loss import OneLossScript, parts
from tests.scripts.samples import SAMPLES, cnn, images, loader, mlp, normal, vectors


class AdversarialTraining(OneLossScript):
    """Inputs moved against the model by several inner steps."""

    follows = "MadryLab/robustness"
    needs = "D"

    def setup(self):
        return parts(cnn(), loader(*images()))

    def loss(self, model, x, y):
        moved = x.clone()
        for _ in range(3):
            moved.requires_grad_()
            loss = F.cross_entropy(model(moved), y)
            (slope,) = torch.autograd.grad(loss, moved)
            moved = (moved.detach() + 0.05 * slope.sign()).clamp(x - 0.1, x + 0.1)
        return F.cross_entropy(model(moved), y)


class VirtualAdversary(OneLossScript):
    """A direction found by one inner backward pass, then two passes that must agree."""

    follows = "lyakaap/VAT-pytorch"
    needs = "DX"

    def setup(self):
        model = mlp(6, 8, 4)
        x, y = vectors()
        return parts(model, loader(x, y, normal(SAMPLES, 6, seed=4)))

    def loss(self, model, x, y, direction):
        truth = model(x).softmax(1).detach()
        d = F.normalize(direction, dim=1).requires_grad_()
        apart = F.kl_div(model(x + 0.1 * d).log_softmax(1), truth, reduction="batchmean")
        (slope,) = torch.autograd.grad(apart, d)
        moved = x + F.normalize(slope, dim=1)
        smooth = F.kl_div(model(moved).log_softmax(1), truth, reduction="batchmean")
        return F.cross_entropy(model(x), y) + smooth
