"""Loops that compute samples from other samples, or keep numbers from step to step, unchanged."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.scripts.samples import loader, mlp, sgd, vectors
from tests.scripts.script import Script, weights


def with_baseline(model, baseline, x, y):
    """Return the loss above a running mean of itself, which each call updates."""
    loss = F.cross_entropy(model(x), y)
    advantage = loss * (1 + baseline[0])
    baseline[0] = 0.9 * baseline[0] + 0.1 * loss.item()
    return advantage


class MixupInTheLoop(Script):
    """Mixes each sample with a partner of the batch, in the loop."""

    follows = "mixup-cifar10"
    needs = "GR"

    @staticmethod
    def plain():
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
        losses = []
        for x, y in data:
            order = torch.arange(len(x)).flip(0)
            x = 0.7 * x + 0.3 * x[order]
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
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
            return F.cross_entropy(model(x), y)

        losses = []
        for x, y in data:
            order = torch.arange(len(x)).flip(0)
            x = 0.7 * x + 0.3 * x[order]
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class NormalisedInTheLoop(Script):
    """Normalises each batch by its own mean and deviation, in the loop."""

    follows = "preprocessing in the loop"
    needs = "G"

    @staticmethod
    def plain():
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
        losses = []
        for x, y in data:
            x = (x - x.mean(0)) / (x.std(0) + 1)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
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
            return F.cross_entropy(model(x), y)

        losses = []
        for x, y in data:
            x = (x - x.mean(0)) / (x.std(0) + 1)
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class NormalisedByNumpy(Script):
    """Normalises each batch by NumPy."""

    follows = "scikit-learn style preprocessing"
    needs = "G"

    @staticmethod
    def plain():
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
        losses = []
        for x, y in data:
            rows = x.numpy()
            x = torch.from_numpy((rows - rows.mean(0)) / (rows.std(0) + 1))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
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
            return F.cross_entropy(model(x), y)

        losses = []
        for x, y in data:
            rows = x.numpy()
            x = torch.from_numpy((rows - rows.mean(0)) / (rows.std(0) + 1))
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class RunningBaseline(Script):
    """Subtracts a running mean of the loss, kept as a number of the script."""

    follows = "REINFORCE with baseline"
    needs = "S"

    @staticmethod
    def plain():
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
        baseline = [0.0]
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y) * (1 + baseline[0])
            loss.backward()
            optimizer.step()
            losses.append(loss)
            baseline[0] = 0.9 * baseline[0] + 0.1 * loss.item()
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
        model, optimizer, data = run.prepare(model, optimizer, data)
        baseline = [0.0]

        def compute_loss(x, y):
            return F.cross_entropy(model(x), y) * (1 + baseline[0])

        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            losses.append(loss)
            baseline[0] = 0.9 * baseline[0] + 0.1 * loss.item()
        return losses, run.weights()


class BaselineInTheLoss(Script):
    """As RunningBaseline, updated inside of the loss."""

    follows = "REINFORCE with baseline"
    needs = "SG"

    @staticmethod
    def plain():
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
        baseline = [0.0]
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = with_baseline(model, baseline, x, y)
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
        baseline = [0.0]

        def compute_loss(x, y):
            return with_baseline(model, baseline, x, y)

        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


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


class ScaledByTheBatch(Script):
    """Scales inputs by a number of the batch, read by item()."""

    follows = "RL observation scaling"
    needs = "G"

    @staticmethod
    def plain():
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
        losses = []
        for x, y in data:
            x = x / x.abs().max().item()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
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
            return F.cross_entropy(model(x), y)

        losses = []
        for x, y in data:
            x = x / x.abs().max().item()
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class NoiseInTheLoop(Script):
    """Adds noise to the inputs in the loop."""

    follows = "denoising"
    needs = "R"

    @staticmethod
    def plain():
        model = mlp(6, 8, 4)
        optimizer = sgd(model.parameters())
        data = loader(*vectors())
        losses = []
        for x, y in data:
            x = x + 0.1 * torch.randn_like(x)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
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
            return F.cross_entropy(model(x), y)

        losses = []
        for x, y in data:
            x = x + 0.1 * torch.randn_like(x)
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


def nothing(_model):
    """Change nothing of a model."""


def with_spread(scores, y):
    """Return a loss with a term that keeps the scores of a batch apart."""
    return F.cross_entropy(scores, y) - 0.1 * scores.var(0).mean()


def plain_loop(data, change=nothing, criterion=F.cross_entropy):
    """Train a classifier on this data, on one process."""
    model = mlp(6, 8, 4)
    optimizer = sgd(model.parameters())
    change(model)
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return losses, weights(model)


def loop_with_shoal(run, data, change=nothing, criterion=F.cross_entropy, calls_backward=False):
    """Train the same with Shoal; `change` is called after the model was prepared."""
    model = mlp(6, 8, 4)
    optimizer = sgd(model.parameters())
    model, optimizer, data = run.prepare(model, optimizer, data)
    change(model)

    def compute_loss(x, y):
        return criterion(model(x), y)

    losses = []
    for x, y in data:
        optimizer.zero_grad()
        if calls_backward:
            loss = run.backward(compute_loss(x, y))
        else:
            loss = run.forward_backward(compute_loss, x, y)
        optimizer.step()
        losses.append(loss)
    return losses, run.weights()


def copy_bias(model):
    """Write a weight as if it had been read from a file."""
    with torch.no_grad():
        model[0].bias.copy_(torch.linspace(-1, 1, 8))


class CopiedByRankZero(Script):
    """Copies weights into the model after it was prepared, on rank 0 alone, which has the file."""

    follows = "if rank == 0: load pretrained weights"
    needs = "W"

    @staticmethod
    def plain():
        return plain_loop(loader(*vectors()), copy_bias)

    @staticmethod
    def with_shoal(run):
        return loop_with_shoal(run, loader(*vectors()), nothing if run.rank else copy_bias)


def padded_late():
    """Return vectors and labels; two of the second batch are -100, which losses leave out."""
    x, y = vectors()
    y[[12, 13]] = -100
    return x, y


class LatePadding(Script):
    """Leaves out padded labels in a mean; the first batch has none."""

    follows = "token losses of packed batches"
    needs = "KC"

    @staticmethod
    def plain():
        return plain_loop(loader(*padded_late()))

    @staticmethod
    def with_shoal(run):
        return loop_with_shoal(run, loader(*padded_late()))


class LatePaddingInTheLoop(Script):
    """Computes the same mean in the loop, for `run.backward`."""

    follows = "token losses of packed batches"

    @staticmethod
    def plain():
        return plain_loop(loader(*padded_late()))

    @staticmethod
    def with_shoal(run):
        return loop_with_shoal(run, loader(*padded_late()), calls_backward=True)


class SpreadInTheLoop(Script):
    """Computes a loss with the variance of a batch in the loop, for `run.backward`."""

    follows = "VICReg"

    @staticmethod
    def plain():
        return plain_loop(loader(*vectors()), criterion=with_spread)

    @staticmethod
    def with_shoal(run):
        return loop_with_shoal(run, loader(*vectors()), criterion=with_spread, calls_backward=True)
