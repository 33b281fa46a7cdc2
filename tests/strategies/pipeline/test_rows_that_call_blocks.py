"""A function calls a block once for each image, so data ranks call it another number of times."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import shoal
from shoal.errors import StrategyRefused
from shoal.run import init_with_place
from shoal.testing import world

BATCH = 7  # 4 images on the first data rank, 3 on the second


def scenes() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    sides = [5, 4, 5, 6, 4, 6, 4, 4, 6, 4, 6, 5, 5, 4]  # odd ones on one data rank, then the other
    images = [torch.randn(1, side, side, generator=generator) for side in sides]
    return [(image.double(), torch.tensor(i % 3)) for i, image in enumerate(images)]


def listed(samples: list[Any]) -> tuple[list[Tensor], list[Tensor]]:
    images, labels = zip(*samples, strict=True)
    return list(images), list(labels)


class Classifier(nn.Module):
    """The middle layer is called for images of odd sides only, so some ranks may never call it."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Conv2d(1, 4, 3, padding=1)
        self.odd = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, images: list[Tensor]) -> Tensor:
        rows = []
        for image in images:
            row = self.backbone(image[None]).relu().mean((0, 2, 3))
            rows.append(self.odd(row) if image.shape[-1] % 2 else row)
        scores: Tensor = self.head(torch.stack(rows))
        return scores


def trained(strategy: str, refuses_on: int = -1) -> dict[str, Tensor]:
    torch.manual_seed(0)
    run = init_with_place(strategy, precision="fp64", announce=lambda _: None)
    model = Classifier().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(scenes(), batch_size=BATCH, collate_fn=listed)
    model, optimizer, loader = run.prepare(model, optimizer, loader)

    def compute_loss(images: list[Tensor], labels: list[Tensor]) -> Any:
        if run.rank == refuses_on and model.backbone(images[0][None]).sum() > 1e9:
            raise AssertionError("no such sum")
        scores = model(images)
        loss = F.cross_entropy(scores, torch.stack(labels), reduction="sum")
        return shoal.counted(loss, len(labels))

    found = {}
    for step, (images, labels) in enumerate(loader):
        optimizer.zero_grad()
        found[f"loss {step}"] = run.forward_backward(compute_loss, images, labels)
        optimizer.step()
    return found | run.weights()


def refused(strategy: str, rank: int) -> str:
    with pytest.raises(StrategyRefused) as caught:
        trained(strategy, refuses_on=rank)
    return str(caught.value)


def both() -> tuple[list[dict[str, Tensor]], list[str]]:
    """Train with cuts that data ranks would place apart; then let one rank alone object."""
    cuts = ["pipeline=2,cuts=head,ddp", "pipeline=2,cuts=odd,zero1"]
    return [trained(strategy) for strategy in cuts], [refused(cuts[0], rank) for rank in (0, 3)]


@pytest.mark.slow
def test_data_ranks_agree_on_stages_and_on_refusals() -> None:
    expected = trained("single")
    for found, refusals in world.run(4, both):
        for results in found:
            assert results.keys() == expected.keys()
            torch.testing.assert_close(results, expected, rtol=1e-10, atol=1e-12)
        assert all("looks at a value" in text for text in refusals)
