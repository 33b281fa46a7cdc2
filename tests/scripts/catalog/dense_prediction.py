"""Dense prediction of images: masks and optical flow."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from tests.scripts.one_loss import OneLossScript, parts
from tests.scripts.samples import built, images, integers, loader, normal


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


class UNetDice(OneLossScript):
    """Segmentation by cross-entropy and the dice coefficient of the batch; RMSprop, plateau."""

    follows = "milesial/Pytorch-UNet"
    needs = "CG"

    def setup(self):
        model = built(SmallUNet)
        optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.9)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return model, optimizer, loader(images()[0], integers(2, 18, 6, 6))

    def loss(self, model, x, mask):
        output = model(x)
        shared, total = _overlap(output, mask)
        return F.cross_entropy(output, mask) + 1 - shared / total

    def shoal_loss(self, run, model, x, mask):
        output = model(x)
        shared, total = _overlap(output, mask)
        shared, total = run.gather(shared[None]).sum(), run.gather(total[None]).sum()
        return F.cross_entropy(output, mask) + 1 - shared / total

    def after_step(self, step, model, optimizer, losses):
        self.plateau.step(losses[-1].item())


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


class SegmentationIgnore(OneLossScript):
    """Dense prediction with ignored pixels and an auxiliary head."""

    follows = "torchvision references segmentation"
    needs = "C"

    def setup(self):
        return parts(built(DeepLab), loader(images()[0], _void(integers(3, 18, 6, 6))))

    def loss(self, model, x, mask):
        output = model(x)
        main, aux = (F.cross_entropy(output[key], mask, ignore_index=255) for key in ("out", "aux"))
        return main + 0.5 * aux

    def shoal_loss(self, run, model, x, mask):
        output = model(x)
        main, aux = (
            F.cross_entropy(output[key], mask, ignore_index=255, reduction="sum")
            for key in ("out", "aux")
        )
        return shoal.counted(main + 0.5 * aux, (mask != 255).sum())


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


class OpticalFlow(OneLossScript):
    """A loss over a sequence of estimates, on valid pixels only."""

    follows = "princeton-vl/RAFT"
    needs = "C"
    clip = 1.0

    def setup(self):
        x, _ = images()
        data = loader(x, x.roll(1, 3), normal(18, 2, 6, 6, seed=3), integers(2, 18, 6, 6))
        return parts(built(Flow), data, lr=0.02)

    def loss(self, model, a, b, truth, valid):
        loss = torch.zeros(())
        for i, flow in enumerate(model(a, b)):
            loss = loss + 0.8 ** (2 - i) * (flow - truth).abs().sum(1)[valid > 0].mean()
        return loss

    def shoal_loss(self, run, model, a, b, truth, valid):
        loss = torch.zeros(())
        for i, flow in enumerate(model(a, b)):
            loss = loss + 0.8 ** (2 - i) * (flow - truth).abs().sum(1)[valid > 0].sum()
        return shoal.counted(loss, (valid > 0).sum())
