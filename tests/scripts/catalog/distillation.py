"""Outputs that are to agree with those of a teacher, or of another pass."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.scripts.samples import (
    loader,
    mlp,
    sgd,
    vectors,
)
from tests.scripts.script import Script, draw_as_rank_0, weights


class Distillation(Script):
    """A large teacher in evaluation mode, a small student; both models are prepared."""

    follows = "Hinton's recipe, facebookresearch/deit"
    needs = "TM"

    @staticmethod
    def plain():
        student, teacher = mlp(6, 4), mlp(6, 16, 4, seed=1)
        teacher.eval().requires_grad_(False)
        optimizer = sgd(student.parameters())
        data = loader(*vectors())
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            output = student(x)
            with torch.no_grad():
                wanted = (teacher(x) / 2).softmax(1)
            soft = F.kl_div((output / 2).log_softmax(1), wanted, reduction="batchmean")
            loss = 0.5 * F.cross_entropy(output, y) + 0.5 * 4 * soft
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(student, teacher)

    @staticmethod
    def with_shoal(run):
        student, teacher = mlp(6, 4), mlp(6, 16, 4, seed=1)
        teacher.eval().requires_grad_(False)
        optimizer = sgd(student.parameters())
        data = loader(*vectors())
        student, teacher, optimizer, data = run.prepare(student, teacher, optimizer, data)

        def compute_loss(x, y):
            output = student(x)
            with torch.no_grad():
                wanted = (teacher(x) / 2).softmax(1)
            soft = F.kl_div((output / 2).log_softmax(1), wanted, reduction="batchmean")
            return 0.5 * F.cross_entropy(output, y) + 0.5 * 4 * soft

        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class AgreeingDropout(Script):
    """Two passes with other masks that must agree."""

    follows = "dropreg/R-Drop"
    needs = "RX"

    @staticmethod
    def plain():
        model = nn.Sequential(mlp(6, 8), nn.Dropout(0.3), mlp(8, 4))
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
        draw_as_rank_0()
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            a, b = model(x).log_softmax(1), model(x).log_softmax(1)
            apart = F.kl_div(a, b, reduction="batchmean", log_target=True)
            loss = F.nll_loss(a, y) + F.nll_loss(b, y) + apart
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = nn.Sequential(mlp(6, 8), nn.Dropout(0.3), mlp(8, 4))
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, y):
            a, b = model(x).log_softmax(1), model(x).log_softmax(1)
            apart = F.kl_div(a, b, reduction="batchmean", log_target=True)
            return F.nll_loss(a, y) + F.nll_loss(b, y) + apart

        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()
