"""Boxes: lists of images and targets, several counts in one loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import shoal
from tests.scripts.one_loss import OneLossScript, parts
from tests.scripts.samples import BATCH, SAMPLES, ListOfSamples, built, integers, normal, sgd
from tests.scripts.script import Script, weights


def _scenes() -> DataLoader:
    """Return a loader of (list of images of other sizes, list of dicts of boxes and labels)."""
    sides, counts = integers(3, SAMPLES, seed=4) + 5, integers(4, SAMPLES, seed=5)
    samples = [
        (
            normal(1, int(side), int(side), seed=i),
            {"boxes": normal(int(n), 4, seed=i), "labels": integers(3, int(n), seed=i)},
        )
        for i, (side, n) in enumerate(zip(sides, counts, strict=True))
    ]
    return DataLoader(ListOfSamples(samples), batch_size=BATCH, collate_fn=_as_lists)


def _as_lists(samples: list) -> tuple[list, list]:
    images, targets = zip(*samples, strict=True)
    return list(images), list(targets)


class Detector(nn.Module):
    """Takes lists, returns a dict of losses in training, as torchvision's detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Conv2d(1, 4, 3, padding=1)
        self.classes, self.boxes = nn.Linear(4, 3), nn.Linear(4, 4)

    def forward(self, images: list[Tensor], targets: list[dict]) -> dict[str, Tensor]:
        sums = self.sums(images, targets)
        n = sum(len(target["labels"]) for target in targets)
        return {name: value / max(n, 1) for name, value in sums.items()}

    def sums(self, images: list[Tensor], targets: list[dict]) -> dict[str, Tensor]:
        h = torch.stack([self.backbone(image[None]).relu().mean((0, 2, 3)) for image in images])
        rows = torch.cat([torch.full((len(t["labels"]),), i) for i, t in enumerate(targets)])
        labels = torch.cat([target["labels"] for target in targets])
        boxes = torch.cat([target["boxes"] for target in targets])
        return {
            "classes": F.cross_entropy(self.classes(h)[rows], labels, reduction="sum"),
            "boxes": F.smooth_l1_loss(self.boxes(h)[rows], boxes, reduction="sum"),
        }


class DetectionLists(OneLossScript):
    """Lists of images and a dict of losses, divided by the boxes of the global batch."""

    follows = "torchvision references detection"
    needs = "VCK"

    def setup(self):
        return parts(built(Detector), _scenes())

    def loss(self, model, images, targets):
        return sum(model(images, targets).values())

    def shoal_loss(self, run, model, images, targets):
        loss = sum(model.sums(images, targets).values())
        return shoal.counted(loss, sum(len(target["labels"]) for target in targets))


class ForgottenBoxCount(DetectionLists):
    """The same with the model's own mean over boxes, whose number differs from rank to rank."""

    follows = "torchvision references detection, unchanged"
    needs = "VCK"
    shoal_loss = OneLossScript.shoal_loss


class FocalAnchors(OneLossScript):
    """Focal loss over all anchors, divided by the positives, plus boxes of the positives."""

    follows = "RetinaNet in torchvision"
    needs = "C"

    def setup(self):
        return parts(built(Anchors), _anchored())

    def loss(self, model, x, labels, boxes):
        scores, guesses = model(x)
        truth = (labels > 0).double()
        cross = F.binary_cross_entropy_with_logits(scores, truth, reduction="none")
        focal = ((1 - (-cross).exp()) ** 2 * cross).sum()
        apart = (guesses - boxes).abs().sum(-1)
        n = truth.sum().clamp(min=1)
        return focal / n + (apart * truth).sum() / n

    def shoal_loss(self, run, model, x, labels, boxes):
        scores, guesses = model(x)
        truth = (labels > 0).double()
        cross = F.binary_cross_entropy_with_logits(scores, truth, reduction="none")
        focal = ((1 - (-cross).exp()) ** 2 * cross).sum()
        apart = (guesses - boxes).abs().sum(-1)
        return shoal.counted(focal + (apart * truth).sum(), truth.sum())


class Anchors(nn.Module):
    """A score and a box for each of four anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.scores, self.boxes = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x).tanh()
        return self.scores(h), self.boxes(h).view(-1, 4, 4)


def _anchored() -> DataLoader:
    from tests.scripts.samples import loader

    labels = integers(3, SAMPLES, 4, seed=6) - 1
    return loader(normal(SAMPLES, 6), labels.clamp(min=0), normal(SAMPLES, 4, 4, seed=3))


class SetPrediction(OneLossScript):
    """Queries matched to boxes; two losses with a count each, over all ranks."""

    follows = "facebookresearch/detr"
    needs = "VCU"
    clip = 0.1

    def setup(self):
        return parts(built(Anchors), _anchored())

    def terms(self, model, x, labels, boxes):
        scores, guesses = model(x)
        cost = torch.cdist(guesses, boxes).detach()
        nearest = cost.argmin(1)
        matched = labels.gather(1, nearest) > 0
        objects = F.binary_cross_entropy_with_logits(scores, matched.double())
        apart = (guesses - boxes.gather(1, nearest[..., None].expand(-1, -1, 4))).abs().sum(-1)
        return objects, (apart * matched).sum(), matched.sum()

    def loss(self, model, *batch):
        objects, apart, matched = self.terms(model, *batch)
        return objects + 5 * apart / matched.clamp(min=1)

    def shoal_loss(self, run, model, *batch):
        objects, apart, matched = self.terms(model, *batch)
        return objects + 5 * shoal.counted(apart, matched)


class LossTimesBatch(Script):
    """The loss multiplied by the batch size, a warm-up of its own for biases."""

    follows = "ultralytics/yolov5"
    needs = "CW"

    @staticmethod
    def plain():
        model = built(Anchors)
        biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
        others = [p for n, p in model.named_parameters() if n.endswith("weight")]
        optimizer = sgd([{"params": biases, "lr": 0.1}, {"params": others, "lr": 0.001}])
        data = _anchored()
        losses = []
        for step, (x, labels, boxes) in enumerate(data):
            optimizer.param_groups[0]["lr"] = 0.05 / (step + 1)
            scores, guesses = model(x)
            truth = (labels > 0).double()
            loss = F.binary_cross_entropy_with_logits(scores, truth) + F.mse_loss(guesses, boxes)
            loss = loss * len(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
        return losses, weights(model)

    @staticmethod
    def with_shoal(run):
        model = built(Anchors)
        biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
        others = [p for n, p in model.named_parameters() if n.endswith("weight")]
        optimizer = sgd([{"params": biases, "lr": 0.1}, {"params": others, "lr": 0.001}])
        data = _anchored()
        model, optimizer, data = run.prepare(model, optimizer, data)

        def compute_loss(x, labels, boxes):
            scores, guesses = model(x)
            truth = (labels > 0).double()
            loss = F.binary_cross_entropy_with_logits(scores, truth) + F.mse_loss(guesses, boxes)
            return loss * len(run.gather(x))

        losses = []
        for step, (x, labels, boxes) in enumerate(data):
            optimizer.param_groups[0]["lr"] = 0.05 / (step + 1)
            loss = run.forward_backward(compute_loss, x, labels, boxes)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
        return losses, run.weights()
