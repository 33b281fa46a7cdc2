"""Classification and dense prediction of images."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from tests.scripts.samples import (
    built,
    cnn,
    images,
    integers,
    loader,
    mlp,
    normal,
    sgd,
    vectors,
)
from tests.scripts.script import Script, draw_as_rank_0, weights


class DigitsCnn(Script):
    """Digits by a CNN: negative log-likelihood, StepLR."""

    follows = "pytorch/examples mnist"

    @staticmethod
    def plain():
        model = cnn()
        optimizer = sgd(model.parameters())
        data = loader(*images())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = F.nll_loss(F.log_softmax(model(x), dim=1), y)
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = cnn()
        optimizer = sgd(model.parameters())
        data = loader(*images())
        model, optimizer, data = run.prepare(model, optimizer, data)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)

        def compute_loss(x, y):
            return F.nll_loss(F.log_softmax(model(x), dim=1), y)

        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            schedule.step()
            losses.append(loss)
        return losses, run.weights()


class RowsRnn(nn.Module):
    """An LSTM that reads an image row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.lstm(x.squeeze(1))
        return self.head(output[:, -1])


class DigitsRnn(Script):
    """Digits by rows in an LSTM."""

    follows = "pytorch/examples mnist_rnn"

    @staticmethod
    def plain():
        model = built(RowsRnn)
        optimizer = torch.optim.Adadelta(model.parameters(), lr=0.5)
        data = loader(*images())
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
        model = built(RowsRnn)
        optimizer = torch.optim.Adadelta(model.parameters(), lr=0.5)
        data = loader(*images())
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, y):
            return F.cross_entropy(model(x), y)

        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, y)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


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


class ImageNetRecipe(Script):
    """A residual network with BatchNorm, label smoothing, accuracy of the outputs."""

    follows = "pytorch/examples imagenet"
    needs = "EB"

    @staticmethod
    def plain():
        model = built(WithBatchNorm)
        optimizer = sgd(model.parameters())
        data = loader(*images())
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
        model = built(WithBatchNorm)
        optimizer = sgd(model.parameters())
        data = loader(*images())
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


class SmallUNet(nn.Module):
    """One level down, one up, with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 4, 3, padding=1)
        self.middle = nn.Conv2d(4, 4, 3, padding=1)
        self.up = nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x).relu()
        deep = self.middle(F.max_pool2d(skip, 2)).relu()
        return self.head(torch.cat([skip, self.up(deep)], dim=1))


def _overlap(output: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numerator and the denominator of the dice coefficient."""
    p = output.softmax(1)[:, 1]
    return 2 * (p * mask).sum(), p.sum() + mask.sum()


class UNetDice(Script):
    """Segmentation by cross-entropy and the dice coefficient of the batch; RMSprop, plateau."""

    follows = "milesial/Pytorch-UNet"
    needs = "CG"

    @staticmethod
    def plain():
        model = built(SmallUNet)
        optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        data = loader(images()[0], integers(2, 18, 6, 6))
        losses = []
        for x, mask in data:
            optimizer.zero_grad()
            output = model(x)
            shared, total = _overlap(output, mask)
            loss = F.cross_entropy(output, mask) + 1 - shared / total
            loss.backward()
            optimizer.step()
            plateau.step(loss.item())
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = built(SmallUNet)
        optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        data = loader(images()[0], integers(2, 18, 6, 6))
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, mask):
            output = model(x)
            shared, total = _overlap(output, mask)
            shared, total = run.gather(shared[None]).sum(), run.gather(total[None]).sum()
            return F.cross_entropy(output, mask) + 1 - shared / total

        losses = []
        for x, mask in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, mask)
            optimizer.step()
            plateau.step(loss.item())
            losses.append(loss)
        return losses, run.weights()


class DeepLab(nn.Module):
    """A dict of two predictions, as torchvision's segmentation models return."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Conv2d(1, 4, 3, padding=1)
        self.classifier = nn.Conv2d(4, 3, 1)
        self.auxiliary = nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.backbone(x).relu()
        return {"out": self.classifier(h), "aux": self.auxiliary(h)}


def _void(mask: Tensor) -> Tensor:
    """Return a mask whose samples ignore different numbers of pixels."""
    columns = torch.arange(mask.shape[-1])
    ends = integers(6, len(mask), 1, 1, seed=3) + 1
    return mask.masked_fill(columns >= ends, 255)


class SegmentationIgnore(Script):
    """Dense prediction with ignored pixels and an auxiliary head."""

    follows = "torchvision references segmentation"
    needs = "C"

    @staticmethod
    def plain():
        model = built(DeepLab)
        optimizer = sgd(model.parameters())
        data = loader(images()[0], _void(integers(3, 18, 6, 6)))
        losses = []
        for x, mask in data:
            optimizer.zero_grad()
            output = model(x)
            main, aux = (
                F.cross_entropy(output[key], mask, ignore_index=255) for key in ("out", "aux")
            )
            loss = main + 0.5 * aux
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = built(DeepLab)
        optimizer = sgd(model.parameters())
        data = loader(images()[0], _void(integers(3, 18, 6, 6)))
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, mask):
            output = model(x)
            main, aux = (
                F.cross_entropy(output[key], mask, ignore_index=255, reduction="sum")
                for key in ("out", "aux")
            )
            return shoal.counted(main + 0.5 * aux, (mask != 255).sum())

        losses = []
        for x, mask in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, x, mask)
            optimizer.step()
            losses.append(loss)
        return losses, run.weights()


class Flow(nn.Module):
    """Refines an estimate of optical flow several times, and returns every estimate."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(1, 4, 3, padding=1)
        self.update = nn.Conv2d(10, 2, 3, padding=1)

    def forward(self, a: Tensor, b: Tensor) -> list[Tensor]:
        fa, fb = self.features(a), self.features(b)
        flow = torch.zeros(len(a), 2, *a.shape[2:])
        estimates = []
        for _ in range(3):
            flow = flow.detach() + self.update(torch.cat([fa, fb, flow.detach()], dim=1))
            estimates.append(flow)
        return estimates


class OpticalFlow(Script):
    """A loss over a sequence of estimates, on valid pixels only."""

    follows = "princeton-vl/RAFT"
    needs = "C"

    @staticmethod
    def plain():
        model = built(Flow)
        optimizer = sgd(model.parameters(), 0.02)
        x, _ = images()
        data = loader(x, x.roll(1, 3), normal(18, 2, 6, 6, seed=3), integers(2, 18, 6, 6))
        losses = []
        for a, b, truth, valid in data:
            optimizer.zero_grad()
            loss = torch.zeros(())
            for i, flow in enumerate(model(a, b)):
                loss = loss + 0.8 ** (2 - i) * (flow - truth).abs().sum(1)[valid > 0].mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = built(Flow)
        optimizer = sgd(model.parameters(), 0.02)
        x, _ = images()
        data = loader(x, x.roll(1, 3), normal(18, 2, 6, 6, seed=3), integers(2, 18, 6, 6))
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(a, b, truth, valid):
            loss = torch.zeros(())
            for i, flow in enumerate(model(a, b)):
                loss = loss + 0.8 ** (2 - i) * (flow - truth).abs().sum(1)[valid > 0].sum()
            return shoal.counted(loss, (valid > 0).sum())

        losses = []
        for a, b, truth, valid in data:
            optimizer.zero_grad()
            loss = run.forward_backward(compute_loss, a, b, truth, valid)
            run.clip_gradients(1.0)
            optimizer.step()
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


class VisionTransformerDropout(Script):
    """A vision transformer with dropout."""

    follows = "rwightman's timm ViT"
    needs = "R"

    @staticmethod
    def plain():
        model = built(VisionTransformer, 0.2)
        optimizer = sgd(model.parameters())
        data = loader(*images())
        draw_as_rank_0()
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
        model = built(VisionTransformer, 0.2)
        optimizer = sgd(model.parameters())
        data = loader(*images())
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, y):
            return F.cross_entropy(model(x), y)

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
