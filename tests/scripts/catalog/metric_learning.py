"""Distances between samples: pairs, triplets and margins."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.scripts.one_loss import OneLossScript, parts
from tests.scripts.samples import SAMPLES, built, images, integers, loader, mlp, normal


class PairNetwork(nn.Module):
    """A trunk that is called for both images of a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU())
        self.head = nn.Linear(16, 1)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head(torch.cat([self.trunk(a), self.trunk(b)], dim=1)).squeeze()


class SiamesePairs(OneLossScript):
    """Pairs of images by a shared trunk: binary cross-entropy of squeezed outputs."""

    follows = "pytorch/examples siamese_network"
    needs = "V"

    def setup(self):
        model = built(PairNetwork)
        x, y = images()
        return parts(model, loader(x, x.flip(0), (y % 2).double()))

    def loss(self, model, a, b, same):
        return F.binary_cross_entropy_with_logits(model(a, b), same)

    def shoal_loss(self, run, model, a, b, same):
        # squeeze() alone would take the dimension of samples too, where a rank has one.
        return F.binary_cross_entropy_with_logits(model(a, b).view(len(same)), same)


class HardTriplets(OneLossScript):
    """The farthest positive and the nearest negative of each sample in the global batch."""

    follows = "KevinMusgrave/pytorch-metric-learning"
    needs = "GU"

    def setup(self):
        return parts(mlp(6, 8, 4), loader(normal(SAMPLES, 6), integers(3, SAMPLES)))

    def loss(self, model, x, y):
        z = model(x)
        apart = torch.cdist(z, z)
        same = y[:, None] == y
        positive = apart.masked_fill(~same, 0).amax(1)
        negative = apart.masked_fill(same, 1e9).amin(1)
        return F.relu(positive - negative + 1).mean()

    def shoal_loss(self, run, model, x, y):
        z, y = run.gather(model(x)), run.gather(y)
        apart = torch.cdist(z, z)
        same = y[:, None] == y
        positive = apart.masked_fill(~same, 0).amax(1)
        negative = apart.masked_fill(same, 1e9).amin(1)
        return F.relu(positive - negative + 1).mean()


class MarginSoftmax(nn.Module):
    """Cosines to the centres of many classes, with a margin for the own class."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 4)
        self.centres = nn.Parameter(torch.randn(30, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        cosines = F.linear(F.normalize(self.body(x), dim=1), F.normalize(self.centres, dim=1))
        return 8 * (cosines - 0.2 * F.one_hot(y, 30))


class ManyClasses(OneLossScript):
    """Faces of many people: an additive margin."""

    follows = "deepinsight/insightface"
    needs = "Z"

    def setup(self):
        torch.manual_seed(0)
        return parts(MarginSoftmax(), loader(normal(SAMPLES, 6), integers(30, SAMPLES)))

    def loss(self, model, x, y):
        return F.cross_entropy(model(x, y), y)
