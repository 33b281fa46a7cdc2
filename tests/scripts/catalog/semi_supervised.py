"""Labelled and unlabelled samples together."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import shoal
from tests.scripts.samples import SAMPLES, loader, mlp, normal, sgd, vectors
from tests.scripts.script import Script, weights


class ConfidentLabels(Script):
    """Labels and unlabelled samples together: only confident predictions count."""

    follows = "google-research/fixmatch"
    needs = "U"

    @staticmethod
    def plain():
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        x, y = vectors()
        data = loader(x, y, normal(SAMPLES, 6, seed=2), normal(SAMPLES, 6, seed=3))
        losses = []
        for x, y, weak, strong in data:
            optimizer.zero_grad()
            confidence, label = model(weak).detach().softmax(1).max(1)
            each = F.cross_entropy(model(strong), label, reduction="none")
            loss = F.cross_entropy(model(x), y) + (each * (confidence > 0.35)).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        x, y = vectors()
        data = loader(x, y, normal(SAMPLES, 6, seed=2), normal(SAMPLES, 6, seed=3))
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, y, weak, strong):
            confidence, label = model(weak).detach().softmax(1).max(1)
            each = F.cross_entropy(model(strong), label, reduction="none")
            return F.cross_entropy(model(x), y) + (each * (confidence > 0.35)).mean()

        losses = []
        for x, y, weak, strong in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y, weak, strong)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class ConfidentMean(Script):
    """The mean over confident samples only: their number differs from rank to rank."""

    follows = "google-research/fixmatch, mean over the confident"
    needs = "CU"

    @staticmethod
    def plain():
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(normal(SAMPLES, 6, seed=2), normal(SAMPLES, 6, seed=3))
        losses = []
        for weak, strong in data:
            optimizer.zero_grad()
            confidence, label = model(weak).detach().softmax(1).max(1)
            sure = confidence > 0.35
            loss = F.cross_entropy(model(strong[sure]), label[sure])
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(normal(SAMPLES, 6, seed=2), normal(SAMPLES, 6, seed=3))
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(weak, strong):
            confidence, label = model(weak).detach().softmax(1).max(1)
            sure = confidence > 0.35
            loss = F.cross_entropy(model(strong[sure]), label[sure], reduction="sum")
            return shoal.counted(loss, sure.sum())

        losses = []
        for weak, strong in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, weak, strong)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class MeanTeacher(Script):
    """Consistency with an average of the weights, by torch's own AveragedModel; a ramp."""

    follows = "CuriousAI/mean-teacher"
    needs = "T"

    @staticmethod
    def plain():
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        teacher = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average)
        x, y = vectors()
        data = loader(x, y, normal(SAMPLES, 6, seed=2))
        losses = []
        for step, (x, y, other) in enumerate(data):
            optimizer.zero_grad()
            wanted = teacher(other).detach()
            loss = F.cross_entropy(model(x), y) + step / 3 * F.mse_loss(model(other), wanted)
            loss.backward()
            optimizer.step()
            teacher.update_parameters(model)
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        teacher = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average)
        x, y = vectors()
        data = loader(x, y, normal(SAMPLES, 6, seed=2))
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, y, other):
            wanted = teacher(other).detach()
            return F.cross_entropy(model(x), y) + step / 3 * F.mse_loss(model(other), wanted)

        losses = []
        for step, (x, y, other) in enumerate(data):  # noqa: B007 - the loss reads it
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y, other)
            optimizer.step()
            teacher.update_parameters(model)
            losses.append(loss)
        return losses, run.weights()
