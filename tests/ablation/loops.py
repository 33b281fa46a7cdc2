"""Loops that compute samples from other samples, or keep numbers from step to step, unchanged."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.scripts.one_loss import OneLossScript, parts
from tests.scripts.samples import loader, mlp, sgd, vectors
from tests.scripts.script import Script, weights


class MixupInTheLoop(OneLossScript):
    """Mixes each sample with a partner of the batch, in the loop."""

    follows = "mixup-cifar10"
    needs = "GR"

    def in_loop(self, x, y):
        order = torch.arange(len(x)).flip(0)
        return 0.7 * x + 0.3 * x[order], y


class NormalisedInTheLoop(OneLossScript):
    """Normalises each batch by its own mean and deviation, in the loop."""

    follows = "preprocessing in the loop"
    needs = "G"

    def in_loop(self, x, y):
        return (x - x.mean(0)) / (x.std(0) + 1), y


class NormalisedByNumpy(OneLossScript):
    """Normalises each batch by NumPy."""

    follows = "scikit-learn style preprocessing"
    needs = "G"

    def in_loop(self, x, y):
        rows = x.numpy()
        return torch.from_numpy((rows - rows.mean(0)) / (rows.std(0) + 1)), y


class RunningBaseline(OneLossScript):
    """Subtracts a running mean of the loss, kept as a number of the script."""

    follows = "REINFORCE with baseline"
    needs = "S"

    def setup(self):
        self.baseline = [0.0]
        return super().setup()

    def loss(self, model, x, y):
        return F.cross_entropy(model(x), y) * (1 + self.baseline[0])

    def after_step(self, step, model, optimizer, losses):
        self.baseline[0] = 0.9 * self.baseline[0] + 0.1 * losses[-1].item()


class BaselineInTheLoss(RunningBaseline):
    """As RunningBaseline, updated inside of the loss."""

    follows = "REINFORCE with baseline"
    needs = "SG"

    def loss(self, model, x, y):
        loss = F.cross_entropy(model(x), y)
        advantage = loss * (1 + self.baseline[0])
        self.baseline[0] = 0.9 * self.baseline[0] + 0.1 * loss.item()
        return advantage

    def after_step(self, step, model, optimizer, losses):
        pass


class BalanceOfOwnLosses(OneLossScript):
    """Weighs a term by a number that the loop sets from the losses that this rank has seen."""

    follows = "BEGAN"
    needs = "S"

    def setup(self):
        self.k, self.seen = 0.5, 0.0
        return super().setup()

    def loss(self, model, x, y):
        output = model(x)
        loss = F.cross_entropy(output, y)
        self.seen = loss.item()
        return loss - self.k * output.square().mean()

    def after_step(self, step, model, optimizer, losses):
        self.k += 0.1 * (self.seen - 1)


class UnitRows(nn.Linear):
    """Brings its rows to length 1 in each forward pass, in place."""

    def forward(self, x):
        with torch.no_grad():
            self.weight.div_(self.weight.norm(dim=1, keepdim=True))
        return super().forward(x)


class WeightsOfUnitLength(OneLossScript):
    """Writes its weights in the forward pass, as embeddings of relations do."""

    follows = "TransE"
    needs = "W"

    def setup(self):
        return parts(nn.Sequential(UnitRows(6, 8), nn.Tanh(), nn.Linear(8, 4)), loader(*vectors()))


class CountsOfTheBatch(Script):
    """Weighs classes by their counts in the batch, which the loss takes from outside."""

    follows = "balanced softmax"
    needs = "G"

    @staticmethod
    def plain():
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
        counts = torch.ones(4)
        losses = []
        for x, y in data:
            counts = torch.bincount(y, minlength=4) + 1.0
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y, weight=len(y) / counts)
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
        counts = torch.ones(4)

        def compute_loss(x, y):
            return F.cross_entropy(model(x), y, weight=len(y) / counts)

        losses = []
        for x, y in data:
            counts = torch.bincount(y, minlength=4) + 1.0
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class ScaledByTheBatch(OneLossScript):
    """Scales inputs by a number of the batch, read by item()."""

    follows = "RL observation scaling"
    needs = "G"

    def in_loop(self, x, y):
        return x / x.abs().max().item(), y


class NoiseInTheLoop(OneLossScript):
    """Adds noise to the inputs in the loop."""

    follows = "denoising"
    needs = "R"

    def in_loop(self, x, y):
        return x + 0.1 * torch.randn_like(x), y


class CopiedByRankZero(Script):
    """Copies weights into the model after it was prepared, on rank 0 alone, which has the file."""

    follows = "if rank == 0: load pretrained weights"
    needs = "W"

    @staticmethod
    def plain():
        model, optimizer, data = parts(mlp(6, 8, 4), loader(*vectors()))
        copy_bias(model)
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model, optimizer, data = run.prepare(*parts(mlp(6, 8, 4), loader(*vectors())))
        if run.rank == 0:
            copy_bias(model)
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = run.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


def copy_bias(model):
    """Write a weight as if it had been read from a file."""
    with torch.no_grad():
        model[0].bias.copy_(torch.linspace(-1, 1, 8))


class LatePadding(OneLossScript):
    """Leaves out padded labels in a mean; the first batch has none."""

    follows = "token losses of packed batches"
    needs = "KC"

    def setup(self):
        x, y = vectors()
        y[[12, 13]] = -100  # in the second batch
        return parts(mlp(6, 8, 4), loader(x, y))


class LatePaddingInTheLoop(LatePadding):
    """Computes the same mean in the loop, for `run.backward`."""

    follows = "token losses of packed batches"
    needs = ""

    @classmethod
    def with_shoal(cls, run):
        run.forward_backward = lambda loss, *batch: run.backward(loss(*batch))
        return super().with_shoal(run)


class SpreadInTheLoop(LatePaddingInTheLoop):
    """Computes a loss with the variance of a batch in the loop, for `run.backward`."""

    follows = "VICReg"

    setup = OneLossScript.setup

    def loss(self, model, x, y):
        scores = model(x)
        return F.cross_entropy(scores, y) - 0.1 * scores.var(0).mean()


class NormOfTheBatch(nn.Linear):
    """Normalises what it returns over the batch, by hand."""

    def forward(self, x):
        hidden = super().forward(x)
        return (hidden - hidden.mean(0)) / (hidden.std(0) + 1)


class NormOfTheBatchInTheLoop(LatePaddingInTheLoop):
    """Has a model that mixes samples, and computes a mean in the loop."""

    follows = "progressive GANs"

    def setup(self):
        layers = NormOfTheBatch(6, 8), nn.Tanh(), nn.Linear(8, 4)
        return parts(nn.Sequential(*layers), loader(*vectors()))


class BankInTheLoop(LatePaddingInTheLoop):
    """Compares outputs with a bank of earlier ones, for `run.backward`."""

    follows = "instance discrimination"
    needs = "S"

    def setup(self):
        self.bank = torch.eye(5).repeat(3, 1)
        return parts(mlp(6, 8, 5), loader(*vectors()))

    def loss(self, model, x, y):
        output = model(x)
        loss = F.cross_entropy(output @ self.bank.T, y)
        self.bank = torch.cat([output.detach()[:1], self.bank[:-1]])
        return loss
