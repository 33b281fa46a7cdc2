"""Losses and targets of image classifiers: smoothing, mixing, weights, hard examples."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import shoal
from tests.scripts.catalog.vision import VisionTransformer
from tests.scripts.samples import (
    built,
    cnn,
    images,
    integers,
    loader,
    mlp,
    sgd,
    vectors,
)
from tests.scripts.script import Script, weights


class LabelSmoothing(Script):
    """Label smoothing and the accuracy of the outputs, without batch statistics."""

    follows = "pytorch/examples imagenet with GroupNorm"
    needs = "E"

    @staticmethod
    def plain():
        model = cnn()
        optimizer = sgd(model.parameters())
        data = loader(*images())
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            output = model(x)
            loss = F.cross_entropy(output, y, label_smoothing=0.1)
            loss.backward()
            optimizer.step()
            losses += [loss, (output.argmax(1) == y).sum()]
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = cnn()
        optimizer = sgd(model.parameters())
        data = loader(*images())
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, y):
            output = model(x)
            loss = F.cross_entropy(output, y, label_smoothing=0.1)
            return loss, shoal.summed((output.argmax(1) == y).sum())

        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss, correct = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            losses += [loss, correct]
        return losses, run.weights()


class Mixup(Script):
    """Mixup of a batch with its own rows reversed, under a fixed weight."""

    follows = "timm train.py"
    needs = "GR"

    @staticmethod
    def plain():
        model = cnn()
        optimizer = sgd(model.parameters())
        data = loader(*images())
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            output = model(0.7 * x + 0.3 * x.flip(0))
            loss = 0.7 * F.cross_entropy(output, y) + 0.3 * F.cross_entropy(output, y.flip(0))
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
            other, label = (run.gather(value).flip(0)[run.rows] for value in (x, y))
            output = model(0.7 * x + 0.3 * other)
            return 0.7 * F.cross_entropy(output, y) + 0.3 * F.cross_entropy(output, label)

        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class LocalMixup(Script):
    """Mixup as it stands on one device: each rank would mix its own rows."""

    follows = "timm train.py, unchanged"
    needs = "G"

    plain = Mixup.plain

    @staticmethod
    def with_shoal(run):
        model = cnn()
        optimizer = sgd(model.parameters())
        data = loader(*images())
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, y):
            output = model(0.7 * x + 0.3 * x.flip(0))
            return 0.7 * F.cross_entropy(output, y) + 0.3 * F.cross_entropy(output, y.flip(0))

        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class ClassWeights(Script):
    """A long-tailed data set: cross-entropy with a weight for each class."""

    follows = "LDAM-DRW"
    needs = "C"

    @staticmethod
    def plain():
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
        weight = torch.tensor([0.2, 0.5, 1.0, 3.0])
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y, weight)
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
        weight = torch.tensor([0.2, 0.5, 1.0, 3.0])
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, y):
            loss = F.cross_entropy(model(x), y, weight, reduction="sum")
            return shoal.counted(loss, weight[y].sum())

        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class ForgottenClassWeights(Script):
    """The same, with the mean left to PyTorch: nobody told Shoal that samples weigh differently."""

    follows = "LDAM-DRW, unchanged"
    needs = "C"

    plain = ClassWeights.plain

    @staticmethod
    def with_shoal(run):
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
        weight = torch.tensor([0.2, 0.5, 1.0, 3.0])
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, y):
            return F.cross_entropy(model(x), y, weight)

        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class HardExamples(Script):
    """Only the hardest half of the samples counts, chosen over the global batch."""

    follows = "OHEM in DeepLab"
    needs = "G"

    @staticmethod
    def plain():
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            each = F.cross_entropy(model(x), y, reduction="none")
            loss = each.topk(len(each) // 2).values.mean()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, y):
            each = run.gather(F.cross_entropy(model(x), y, reduction="none"))
            return each.topk(len(each) // 2).values.mean()

        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class MultiLabel(Script):
    """A vision transformer of several labels, with weights of positives; AdamW, clipping."""

    follows = "timm train.py --bce-loss"
    needs = "W"

    @staticmethod
    def plain():
        model = built(VisionTransformer, 0.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
        data = loader(images()[0], integers(2, 18, 4).double())
        positive = torch.tensor([1.0, 2.0, 0.5, 3.0])
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(model(x), y, pos_weight=positive)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = built(VisionTransformer, 0.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
        data = loader(images()[0], integers(2, 18, 4).double())
        positive = torch.tensor([1.0, 2.0, 0.5, 3.0])
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, y):
            return F.binary_cross_entropy_with_logits(model(x), y, pos_weight=positive)

        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            run.clip_gradients(0.5)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()
