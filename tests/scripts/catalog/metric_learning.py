"""Distances between samples: pairs, triplets and margins."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.scripts.samples import (
    SAMPLES,
    built,
    images,
    integers,
    loader,
    mlp,
    normal,
    sgd,
)
from tests.scripts.script import Script, weights


class PairNetwork(nn.Module):
    """A trunk that is called for both images of a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU())
        self.head = nn.Linear(16, 1)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head(torch.cat([self.trunk(a), self.trunk(b)], dim=1)).squeeze()


class SiamesePairs(Script):
    """Pairs of images by a shared trunk: binary cross-entropy of squeezed outputs."""

    follows = "pytorch/examples siamese_network"
    needs = "V"

    @staticmethod
    def plain():
        model = built(PairNetwork)
        optimizer = sgd(model.parameters())
        x, y = images()
        data = loader(x, x.flip(0), (y % 2).double())
        losses = []
        for a, b, same in data:
            optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(model(a, b), same)
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = built(PairNetwork)
        optimizer = sgd(model.parameters())
        x, y = images()
        data = loader(x, x.flip(0), (y % 2).double())
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(a, b, same):
            # squeeze() alone would take the dimension of samples too, where a rank has one.
            return F.binary_cross_entropy_with_logits(model(a, b).view(len(same)), same)

        losses = []
        for a, b, same in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, a, b, same)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class HardTriplets(Script):
    """The farthest positive and the nearest negative of each sample in the global batch."""

    follows = "KevinMusgrave/pytorch-metric-learning"
    needs = "GU"

    @staticmethod
    def plain():
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(normal(SAMPLES, 6), integers(3, SAMPLES))
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            z = model(x)
            apart = torch.cdist(z, z)
            same = y[:, None] == y
            positive = apart.masked_fill(~same, 0).amax(1)
            negative = apart.masked_fill(same, 1e9).amin(1)
            loss = F.relu(positive - negative + 1).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(normal(SAMPLES, 6), integers(3, SAMPLES))
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, y):
            z, y = run.gather(model(x)), run.gather(y)
            apart = torch.cdist(z, z)
            same = y[:, None] == y
            positive = apart.masked_fill(~same, 0).amax(1)
            negative = apart.masked_fill(same, 1e9).amin(1)
            return F.relu(positive - negative + 1).mean()

        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class MarginSoftmax(nn.Module):
    """Cosines to the centres of many classes, with a margin for the own class."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 4)
        self.centres = nn.Parameter(torch.randn(30, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        cosines = F.linear(F.normalize(self.body(x), dim=1), F.normalize(self.centres, dim=1))
        return 8 * (cosines - 0.2 * F.one_hot(y, 30))


class ManyClasses(Script):
    """Faces of many people: an additive margin."""

    follows = "deepinsight/insightface"
    needs = "Z"

    @staticmethod
    def plain():
        torch.manual_seed(0)
        model = MarginSoftmax()
        optimizer = sgd(model.parameters())
        data = loader(normal(SAMPLES, 6), integers(30, SAMPLES))
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x, y), y)
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        torch.manual_seed(0)
        model = MarginSoftmax()
        optimizer = sgd(model.parameters())
        data = loader(normal(SAMPLES, 6), integers(30, SAMPLES))
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, y):
            return F.cross_entropy(model(x, y), y)

        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()
