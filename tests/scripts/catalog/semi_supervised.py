"""Labelled and unlabelled samples together."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import shoal
from tests.scripts.one_loss import OneLossScript, parts
from tests.scripts.samples import SAMPLES, loader, mlp, normal, vectors


class ConfidentLabels(OneLossScript):
    """Labels and unlabelled samples together: only confident predictions count."""

    follows = "google-research/fixmatch"
    needs = "U"

    def setup(self):
        model = mlp(6, 8, 4)
        x, y = vectors()
        return parts(model, loader(x, y, normal(SAMPLES, 6, seed=2), normal(SAMPLES, 6, seed=3)))

    def loss(self, model, x, y, weak, strong):
        confidence, label = model(weak).detach().softmax(1).max(1)
        each = F.cross_entropy(model(strong), label, reduction="none")
        return F.cross_entropy(model(x), y) + (each * (confidence > 0.35)).mean()


class ConfidentMean(OneLossScript):
    """The mean over confident samples only: their number differs from rank to rank."""

    follows = "google-research/fixmatch, mean over the confident"
    needs = "CU"

    def setup(self):
        return parts(mlp(6, 8, 4), loader(normal(SAMPLES, 6, seed=2), normal(SAMPLES, 6, seed=3)))

    def loss(self, model, weak, strong):
        confidence, label = model(weak).detach().softmax(1).max(1)
        sure = confidence > 0.35
        return F.cross_entropy(model(strong[sure]), label[sure])

    def shoal_loss(self, run, model, weak, strong):
        confidence, label = model(weak).detach().softmax(1).max(1)
        sure = confidence > 0.35
        loss = F.cross_entropy(model(strong[sure]), label[sure], reduction="sum")
        return shoal.counted(loss, sure.sum())


class MeanTeacher(OneLossScript):
    """Consistency with an average of the weights, by torch's own AveragedModel; a ramp."""

    follows = "CuriousAI/mean-teacher"
    needs = "T"

    def setup(self):
        model = mlp(6, 8, 4)
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        self.teacher = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average)
        self.ramp = 0.0
        return parts(model, loader(*vectors(), normal(SAMPLES, 6, seed=2)))

    def loss(self, model, x, y, other):
        wanted = self.teacher(other).detach()
        return F.cross_entropy(model(x), y) + self.ramp * F.mse_loss(model(other), wanted)

    def after_step(self, step, model, optimizer, losses):
        self.teacher.update_parameters(model)
        self.ramp = (step + 1) / 3
