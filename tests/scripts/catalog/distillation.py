"""Outputs that are to agree with those of a teacher, or of another pass."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.scripts.one_loss import OneLossScript, parts
from tests.scripts.samples import loader, mlp, sgd, vectors


class Distillation(OneLossScript):
    """A large teacher in evaluation mode, a small student; both models are prepared."""

    follows = "Hinton's recipe, facebookresearch/deit"
    needs = "TM"

    def setup(self):
        student, teacher = mlp(6, 4), mlp(6, 16, 4, seed=1)
        teacher.eval().requires_grad_(False)
        optimizer = sgd(student.parameters())
        data = loader(*vectors())
        return student, teacher, optimizer, data

    def loss(self, student, teacher, x, y):
        output = student(x)
        with torch.no_grad():
            wanted = (teacher(x) / 2).softmax(1)
        soft = F.kl_div((output / 2).log_softmax(1), wanted, reduction="batchmean")
        return 0.5 * F.cross_entropy(output, y) + 0.5 * 4 * soft


class AgreeingDropout(OneLossScript):
    """Two passes with other masks that must agree."""

    follows = "dropreg/R-Drop"
    needs = "RX"
    draws = True

    def setup(self):
        return parts(nn.Sequential(mlp(6, 8), nn.Dropout(0.3), mlp(8, 4)), loader(*vectors()))

    def loss(self, model, x, y):
        a, b = model(x).log_softmax(1), model(x).log_softmax(1)
        apart = F.kl_div(a, b, reduction="batchmean", log_target=True)
        return F.nll_loss(a, y) + F.nll_loss(b, y) + apart
