"""Inputs moved against the model."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.scripts.samples import SAMPLES, cnn, images, loader, mlp, normal, sgd, vectors
from tests.scripts.script import Script, weights


class AdversarialTraining(Script):
    """Inputs moved against the model by several inner steps."""

    follows = "MadryLab/robustness"
    needs = "D"

    @staticmethod
    def plain():
        model = cnn()
        optimizer = sgd(model.parameters())
        data = loader(*images())
        losses = []
        for x, y in data:
            moved = x.clone()
            for _ in range(3):
                moved.requires_grad_()
                loss = F.cross_entropy(model(moved), y)
                (slope,) = torch.autograd.grad(loss, moved)
                moved = (moved.detach() + 0.05 * slope.sign()).clamp(x - 0.1, x + 0.1)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(moved), y)
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = cnn()
        optimizer = sgd(model.parameters())
        data = loader(*images())
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, y):
            moved = x.clone()
            for _ in range(3):
                moved.requires_grad_()
                loss = F.cross_entropy(model(moved), y)
                (slope,) = torch.autograd.grad(loss, moved)
                moved = (moved.detach() + 0.05 * slope.sign()).clamp(x - 0.1, x + 0.1)
            return F.cross_entropy(model(moved), y)

        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class VirtualAdversary(Script):
    """A direction found by one inner backward pass, then two passes that must agree."""

    follows = "lyakaap/VAT-pytorch"
    needs = "DX"

    @staticmethod
    def plain():
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        x, y = vectors()
        data = loader(x, y, normal(SAMPLES, 6, seed=4))
        losses = []
        for x, y, direction in data:
            optimizer.zero_grad()
            truth = model(x).softmax(1).detach()
            d = F.normalize(direction, dim=1).requires_grad_()
            apart = F.kl_div(model(x + 0.1 * d).log_softmax(1), truth, reduction="batchmean")
            (slope,) = torch.autograd.grad(apart, d)
            moved = x + F.normalize(slope, dim=1)
            smooth = F.kl_div(model(moved).log_softmax(1), truth, reduction="batchmean")
            loss = F.cross_entropy(model(x), y) + smooth
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        x, y = vectors()
        data = loader(x, y, normal(SAMPLES, 6, seed=4))
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, y, direction):
            truth = model(x).softmax(1).detach()
            d = F.normalize(direction, dim=1).requires_grad_()
            apart = F.kl_div(model(x + 0.1 * d).log_softmax(1), truth, reduction="batchmean")
            (slope,) = torch.autograd.grad(apart, d)
            moved = x + F.normalize(slope, dim=1)
            smooth = F.kl_div(model(moved).log_softmax(1), truth, reduction="batchmean")
            return F.cross_entropy(model(x), y) + smooth

        losses = []
        for x, y, direction in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y, direction)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()
