"""Tensors of a batch that have other rows than samples, as the boxes of all images have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import shoal
from shoal.testing import world
from tests.harness.in_turn import in_turn

IMAGES = 4
"""Of a batch."""


def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return images, and boxes of all images, each with the number of its image."""
    boxes = [torch.cat([torch.full((len(b), 1), i), b], 1) for i, (_, b) in enumerate(samples)]
    return torch.stack([image for image, _ in samples]), torch.cat(boxes)


def trained(strategy: str, form: str, boxes: list[int]) -> list[float]:
    """Return the losses of steps on images with so many boxes each."""
    run = shoal.init(strategy, precision="fp64", announce=lambda _: None)
    torch.manual_seed(0)
    images = torch.randn(len(boxes), 5).double()
    samples = [(x, torch.rand(n, 3).double()) for x, n in zip(images, boxes, strict=True)]
    model = nn.Linear(5, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(samples, batch_size=IMAGES, collate_fn=collate)  # type: ignore[arg-type]
    model, optimizer, loader = run.prepare(model, optimizer, loader)

    def compute_loss(images: Tensor, boxes: Tensor) -> shoal.Counted:
        found = model(images)[boxes[:, 0].long()]
        return shoal.counted((found - boxes[:, 1:]).square().sum(), len(boxes))

    losses = []
    for batch in loader:
        optimizer.zero_grad()
        if form == "loop":
            loss = run.backward(compute_loss(*batch))
        else:
            loss = run.forward_backward(compute_loss, *batch)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("form", "boxes"),
    [
        # As many boxes as images in the second batch of both ranks.
        ("loop", [2, 2, 1, 0, 0, 2, 2, 0]),
        ("function", [2, 2, 1, 0, 0, 2, 2, 0]),
        # In the first one on one rank.
        ("function", [0, 2, 1, 2, 1, 2, 2, 0]),
    ],
)
def test_as_many_boxes_as_images_are_not_taken_for_rows_of_samples(
    form: str, boxes: list[int]
) -> None:
    alone = trained("single", form, boxes)
    calls = [(strategy, form, boxes) for strategy in ("ddp", "zero3")]
    for found in world.run(2, in_turn, trained, *calls):
        for losses in found:
            assert losses == pytest.approx(alone, rel=1e-12)
