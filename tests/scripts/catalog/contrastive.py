"""Losses in which every sample meets every other one."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.scripts.one_loss import OneLossScript, parts
from tests.scripts.samples import SAMPLES, integers, loader, mlp, normal, sgd


class SimClr(OneLossScript):
    """Two views of each sample against all other views of the global batch."""

    follows = "google-research/simclr"
    needs = "G"

    def setup(self):
        return parts(mlp(6, 8, 4), loader(normal(SAMPLES, 6), normal(SAMPLES, 6, seed=1)))

    def loss(self, model, a, b):
        za, zb = F.normalize(model(a), dim=1), F.normalize(model(b), dim=1)
        n = len(za)
        views = torch.cat([za, zb])
        scores = (views @ views.T / 0.5).fill_diagonal_(-1e9)
        return F.cross_entropy(scores, (torch.arange(2 * n) + n) % (2 * n))

    def shoal_loss(self, run, model, a, b):
        za, zb = F.normalize(model(a), dim=1), F.normalize(model(b), dim=1)
        za, zb = run.gather(za), run.gather(zb)
        n = len(za)
        views = torch.cat([za, zb])
        scores = (views @ views.T / 0.5).fill_diagonal_(-1e9)
        return F.cross_entropy(scores, (torch.arange(2 * n) + n) % (2 * n))


class Clip(nn.Module):
    """Two towers and a temperature, whose parts are called by name."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(6, 4), nn.Linear(5, 4)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def encode_image(self, image: Tensor) -> Tensor:
        return F.normalize(self.image(image), dim=1)

    def encode_text(self, text: Tensor) -> Tensor:
        return F.normalize(self.text(text), dim=1)


class ImageTextPairs(OneLossScript):
    """Own images against all texts and the other way round; the temperature is clamped by hand."""

    follows = "mlfoundations/open_clip"
    needs = "GWX"

    def setup(self):
        torch.manual_seed(0)
        return parts(Clip(), loader(normal(SAMPLES, 6), normal(SAMPLES, 5, seed=1)), lr=0.02)

    def loss(self, model, image, text):
        i, t = model.encode_image(image), model.encode_text(text)
        scale = model.logit_scale.exp()
        own = torch.arange(len(i))
        return F.cross_entropy(scale * i @ t.T, own) + F.cross_entropy(scale * t @ i.T, own)

    def shoal_loss(self, run, model, image, text):
        i, t = model.encode_image(image), model.encode_text(text)
        scale = model.logit_scale.exp()
        every_i, every_t = run.gather(i), run.gather(t)
        own = torch.arange(len(every_i))[run.rows]
        return F.cross_entropy(scale * i @ every_t.T, own) + F.cross_entropy(
            scale * t @ every_i.T, own
        )

    def after_step(self, step, model, optimizer, losses):
        with torch.no_grad():
            model.logit_scale.clamp_(0, math.log(14))


class ImageTextForgotten(ImageTextPairs):
    """The same without gathering: each rank would contrast with its own samples only."""

    follows = "mlfoundations/open_clip, unchanged"
    needs = "GWX"
    shoal_loss = OneLossScript.shoal_loss


class SigmoidPairs(OneLossScript):
    """Every pair of the global batch is a sample of its own: positive on the diagonal."""

    follows = "google-research/big_vision SigLIP"
    needs = "G"

    def setup(self):
        image_tower, text_tower = mlp(6, 4), mlp(5, 4, seed=1)
        optimizer = sgd([*image_tower.parameters(), *text_tower.parameters()])
        data = loader(normal(SAMPLES, 6), normal(SAMPLES, 5, seed=1))
        return image_tower, text_tower, optimizer, data

    def loss(self, image_tower, text_tower, image, text):
        i, t = F.normalize(image_tower(image), dim=1), F.normalize(text_tower(text), dim=1)
        signs = 2 * torch.eye(len(i)) - 1
        return -F.logsigmoid(signs * (10 * i @ t.T - 10)).sum() / len(i)

    def shoal_loss(self, run, image_tower, text_tower, image, text):
        i, t = F.normalize(image_tower(image), dim=1), F.normalize(text_tower(text), dim=1)
        t = run.gather(t)
        signs = 2 * torch.eye(len(t))[run.rows] - 1
        return -F.logsigmoid(signs * (10 * i @ t.T - 10)).sum() / len(i)


class BarlowTwins(OneLossScript):
    """The cross-correlation of two views over the global batch is to be the identity."""

    follows = "facebookresearch/barlowtwins"
    needs = "G"

    def setup(self):
        return parts(mlp(6, 8, 4), loader(normal(SAMPLES, 6), normal(SAMPLES, 6, seed=1)), lr=0.01)

    def loss(self, model, a, b):
        za, zb = model(a), model(b)
        za, zb = ((z - z.mean(0)) / z.std(0) for z in (za, zb))
        c = za.T @ zb / len(za)
        return (c.diag() - 1).pow(2).sum() + 0.01 * (c - c.diag().diag()).pow(2).sum()

    def shoal_loss(self, run, model, a, b):
        za, zb = run.gather(model(a)), run.gather(model(b))
        za, zb = ((z - z.mean(0)) / z.std(0) for z in (za, zb))
        c = za.T @ zb / len(za)
        return (c.diag() - 1).pow(2).sum() + 0.01 * (c - c.diag().diag()).pow(2).sum()


class SurvivalRisk(OneLossScript):
    """Cox's partial likelihood: each event against all who are still at risk."""

    follows = "havakv/pycox"
    needs = "G"

    def setup(self):
        return parts(
            mlp(6, 8, 1),
            loader(normal(SAMPLES, 6), normal(SAMPLES, seed=2), integers(2, SAMPLES).double()),
        )

    def loss(self, model, x, time, event):
        risk = model(x).squeeze(1)
        order = time.argsort(descending=True)
        risk, event = risk[order], event[order]
        return -((risk - risk.logcumsumexp(0)) * event).sum() / event.sum()

    def shoal_loss(self, run, model, x, time, event):
        risk = run.gather(model(x).squeeze(1))
        time, event = run.gather(time), run.gather(event)
        order = time.argsort(descending=True)
        risk, event = risk[order], event[order]
        return -((risk - risk.logcumsumexp(0)) * event).sum() / event.sum()
