"""Classification of images."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from tests.scripts.one_loss import OneLossScript, parts
from tests.scripts.samples import built, cnn, images, loader, mlp, normal, sgd
from tests.scripts.script import Script, weights


class DigitsCnn(OneLossScript):
    """Digits by a CNN: negative log-likelihood, StepLR."""

    follows = "pytorch/examples mnist"

    def setup(self):
        model, optimizer, data = parts(cnn(), loader(*images()))
        self.schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
        return model, optimizer, data

    def loss(self, model, x, y):
        return F.nll_loss(F.log_softmax(model(x), dim=1), y)

    def after_step(self, step, model, optimizer, losses):
        self.schedule.step()


class RowsRnn(nn.Module):
    """An LSTM that reads an image row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.lstm(x.squeeze(1))
        return self.head(output[:, -1])


class DigitsRnn(OneLossScript):
    """Digits by rows in an LSTM."""

    follows = "pytorch/examples mnist_rnn"

    def setup(self):
        model = built(RowsRnn)
        optimizer = torch.optim.Adadelta(model.parameters(), lr=0.5)
        data = loader(*images())
        return model, optimizer, data


class ForwardForward(Script):
    """Layers trained one by one by losses of their own, without a backward pass through all."""

    follows = "pytorch/examples mnist_forward_forward"
    needs = "OX"

    @staticmethod
    def plain():
        model = mlp(6, 8, 8)
        layers = [model[0], model[2]]
        optimizers = [sgd(layer.parameters(), 0.03) for layer in layers]
        data = loader(normal(18, 6), normal(18, 6, seed=1))
        losses = []
        for good, bad in data:
            for layer, optimizer in zip(layers, optimizers, strict=True):
                optimizer.zero_grad()
                a, b = layer(good).relu(), layer(bad).relu()
                loss = F.softplus(torch.cat([2 - a.pow(2).mean(1), b.pow(2).mean(1) - 2])).mean()
                loss.backward()
                optimizer.step()
                losses.append(loss)
                good, bad = a.detach(), b.detach()
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = mlp(6, 8, 8)
        layers = [model[0], model[2]]
        optimizers = [sgd(layer.parameters(), 0.03) for layer in layers]
        data = loader(normal(18, 6), normal(18, 6, seed=1))
        model, *optimizers, data = run.prepare(model, *optimizers, data)
        losses = []

        def compute_loss(layer, good, bad):
            a, b = layer(good).relu(), layer(bad).relu()
            loss = F.softplus(torch.cat([2 - a.pow(2).mean(1), b.pow(2).mean(1) - 2])).mean()
            return loss, (a, b)

        for good, bad in data:
            rows = len(good)
            for layer, optimizer in zip(layers, optimizers, strict=True):
                optimizer.zero_grad()
                loss_of_layer = partial(compute_loss, layer)
                loss, (a, b) = run.forward_backward(loss_of_layer, good, bad, rows=rows)
                optimizer.step()
                losses.append(loss)
                good, bad = a.detach(), b.detach()
        return losses, run.weights()


class WithBatchNorm(nn.Module):
    """A convolution with BatchNorm and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.stem(x)).relu()
        return self.head((h + self.conv(h)).mean((2, 3)))


class ImageNetRecipe(Script):
    """A residual network with BatchNorm, label smoothing, accuracy of the outputs."""

    follows = "pytorch/examples imagenet"
    needs = "EB"

    @staticmethod
    def plain():
        model, optimizer, data = parts(built(WithBatchNorm), loader(*images()))
        criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        losses, correct = [], 0
        for x, y in data:
            output = model(x)
            loss = criterion(output, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            correct += (output.argmax(1) == y).sum()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model, optimizer, data = parts(built(WithBatchNorm), loader(*images()))
        criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, y):
            output = model(x)
            return criterion(output, y), shoal.summed((output.argmax(1) == y).sum())

        losses, correct = [], 0
        for x, y in data:
            optimizer.zero_grad()
            loss, hits = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            correct += hits
            losses.append(loss)
        return losses, run.weights()


class ProgressiveResizing(Script):
    """Larger images and a new loader in the second phase."""

    follows = "fastai DAWNBench"
    needs = "FV"

    @staticmethod
    def plain():
        model = built(WithGroupNorm)
        optimizer = sgd(model.parameters())
        losses = []
        for side in (4, 6):
            data = loader(*images(side))
            for x, y in data:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = built(WithGroupNorm)
        optimizer = sgd(model.parameters())
        loaders = [loader(*images(side)) for side in (4, 6)]
        model, optimizer, *loaders = run.prepare(model, optimizer, *loaders)

        def compute_loss(x, y):
            return F.cross_entropy(model(x), y)

        losses = []
        for data in loaders:
            for x, y in data:
                optimizer.zero_grad()
                loss = run.forward_backward(compute_loss, x, y)
                optimizer.step()
                losses.append(loss)
        return losses, run.weights()


class WithGroupNorm(nn.Module):
    """A fully convolutional classifier of images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.stem(x)).relu().mean((2, 3)))


class VisionTransformer(nn.Module):
    """Patches, a class token, an encoder with dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 8, 2, stride=2)
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.expand(len(h), -1, -1), h], dim=1)
        return self.head(self.encoder(h)[:, 0])


class VisionTransformerDropout(OneLossScript):
    """A vision transformer with dropout."""

    follows = "rwightman's timm ViT"
    needs = "R"
    draws = True

    def setup(self):
        return parts(built(VisionTransformer, 0.2), loader(*images()))
