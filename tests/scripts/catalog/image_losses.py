"""Losses and targets of image classifiers: smoothing, mixing, weights, hard examples."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import shoal
from tests.scripts.catalog.vision import VisionTransformer
from tests.scripts.one_loss import OneLossScript, parts
from tests.scripts.samples import built, cnn, images, integers, loader, mlp, vectors
from tests.scripts.script import Script, weights


class LabelSmoothing(Script):
    """Label smoothing and the accuracy of the outputs, without batch statistics."""

    follows = "pytorch/examples imagenet with GroupNorm"
    needs = "E"

    @staticmethod
    def plain():
        model, optimizer, data = parts(cnn(), loader(*images()))
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
        model, optimizer, data = run.prepare(*parts(cnn(), loader(*images())))

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


class Mixup(OneLossScript):
    """Mixup of a batch with its own rows reversed, under a fixed weight."""

    follows = "timm train.py"
    needs = "GR"

    def setup(self):
        return parts(cnn(), loader(*images()))

    def loss(self, model, x, y):
        output = model(0.7 * x + 0.3 * x.flip(0))
        return 0.7 * F.cross_entropy(output, y) + 0.3 * F.cross_entropy(output, y.flip(0))

    def shoal_loss(self, run, model, x, y):
        other, label = (run.gather(value).flip(0)[run.rows] for value in (x, y))
        output = model(0.7 * x + 0.3 * other)
        return 0.7 * F.cross_entropy(output, y) + 0.3 * F.cross_entropy(output, label)


class LocalMixup(Mixup):
    """Mixup as it stands on one device: each rank would mix its own rows."""

    follows = "timm train.py, unchanged"
    needs = "G"
    shoal_loss = OneLossScript.shoal_loss


class ClassWeights(OneLossScript):
    """A long-tailed data set: cross-entropy with a weight for each class."""

    follows = "LDAM-DRW"
    needs = "C"

    def setup(self):
        model = mlp(6, 8, 4)
        self.weight = torch.tensor([0.2, 0.5, 1.0, 3.0])
        return parts(model, loader(*vectors()))

    def loss(self, model, x, y):
        return F.cross_entropy(model(x), y, self.weight)

    def shoal_loss(self, run, model, x, y):
        loss = F.cross_entropy(model(x), y, self.weight, reduction="sum")
        return shoal.counted(loss, self.weight[y].sum())


class ForgottenClassWeights(ClassWeights):
    """The same, with the mean left to PyTorch: nobody told Shoal that samples weigh differently."""

    follows = "LDAM-DRW, unchanged"
    needs = "C"
    shoal_loss = OneLossScript.shoal_loss


class HardExamples(OneLossScript):
    """Only the hardest half of the samples counts, chosen over the global batch."""

    follows = "OHEM in DeepLab"
    needs = "G"

    def loss(self, model, x, y):
        each = F.cross_entropy(model(x), y, reduction="none")
        return each.topk(len(each) // 2).values.mean()

    def shoal_loss(self, run, model, x, y):
        each = run.gather(F.cross_entropy(model(x), y, reduction="none"))
        return each.topk(len(each) // 2).values.mean()


class MultiLabel(OneLossScript):
    """A vision transformer of several labels, with weights of positives; AdamW, clipping."""

    follows = "timm train.py --bce-loss"
    needs = "W"
    clip = 0.5

    def setup(self):
        model = built(VisionTransformer, 0.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
        data = loader(images()[0], integers(2, 18, 4).double())
        self.positive = torch.tensor([1.0, 2.0, 0.5, 3.0])
        return model, optimizer, data

    def loss(self, model, x, y):
        return F.binary_cross_entropy_with_logits(model(x), y, pos_weight=self.positive)
