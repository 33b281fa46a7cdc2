"""Lists of tensors or dicts are read as samples or as columns by what has made them."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

import shoal
from shoal.data.batch_shards import share_batch
from shoal.data.tree_map import SampleList, mark_sample_lists, nothing_known
from shoal.errors import UsageError
from shoal.testing import world
from tests.harness.in_turn import in_turn


class Scenes:
    """Images with two boxes each."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(index)
        image = torch.randn(3, 4 + index % 2, 4, generator=generator, dtype=torch.float64)
        boxes = torch.randn(2, 4, generator=generator, dtype=torch.float64)
        return image, {"boxes": boxes, "weight": torch.ones(2).double() * (index + 1)}


class Pairs(Scenes):
    """Two columns, each a dict."""

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        _, target = super().__getitem__(index)
        return target["boxes"].sum(), (
            {"x": target["boxes"][0], "y": target["boxes"][1]},
            {"x": target["boxes"][1], "y": target["boxes"][0] * (index + 1)},
        )


def as_lists(samples: list[Any]) -> tuple[Any, ...]:
    return tuple(zip(*samples, strict=True))


def stacked(samples: list[Any]) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Images in one tensor, as DETR has them: nothing beside the targets tells their number."""
    return torch.stack([image[:, :4] for image, _ in samples]), [target for _, target in samples]


def own_columns(samples: list[Any]) -> Any:
    return default_collate(samples)


CASES = [(Scenes, as_lists), (Scenes, stacked), (Pairs, default_collate), (Pairs, own_columns)]


def trained(accumulate: int, batch_size: int) -> list[list[float]]:
    return [
        trained_on(DataLoader(data(), batch_size, collate_fn=f), accumulate) for data, f in CASES
    ]


def trained_on(loader: DataLoader, accumulate: int) -> list[float]:
    run = shoal.init("ddp", accumulate=accumulate, announce=lambda _: None)
    torch.manual_seed(0)
    model = nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = run.prepare(model, optimizer, loader)

    def of_sample(image: Tensor, target: dict[str, Tensor]) -> Tensor:
        return (model(target["boxes"])[:, 0] * target["weight"]).sum() * image.sum()

    def detection_loss(images: Any, targets: Any) -> Tensor:
        assert len(images) == len(targets)
        return torch.stack([*map(of_sample, images, targets)]).mean()

    def pair_loss(bias: Tensor, columns: Any) -> Tensor:
        left, right = columns
        outputs = model(left["x"]) * model(right["y"]) + model(left["y"]) * bias[:, None]
        return F.softplus(outputs).mean()

    losses = []
    for first, second in loader:
        optimizer.zero_grad()
        if isinstance(loader.dataset, Pairs):
            loss = run.forward_backward(pair_loss, first, second)
        else:  # moved to a device, as such scripts do
            targets = [{key: value.clone() for key, value in target.items()} for target in second]
            loss = run.forward_backward(detection_loss, first, targets)
        losses.append(loss.item())
        optimizer.step()
    return losses


@pytest.mark.parametrize(
    ("ranks", "accumulate", "batch_size"),
    [(2, 1, 4), pytest.param(1, 2, 2, marks=pytest.mark.slow)],
)
def test_two_samples_with_two_rows_each_are_no_columns(
    ranks: int, accumulate: int, batch_size: int
) -> None:
    expected = trained(1, batch_size)
    for found in world.run(ranks, trained, accumulate, batch_size):
        for losses, right in zip(found, expected, strict=True):
            assert losses == pytest.approx(right, rel=1e-10)


def boxes_alone(samples: list[Any]) -> tuple[Tensor, list[Tensor]]:
    """Boxes of each image in one tensor, as the scripts of SSD have them."""
    images, targets = stacked(samples)
    return images, [target["boxes"] * target["weight"][0] for target in targets]


def trained_on_boxes(accumulate: int, by_function: bool) -> list[float]:
    run = shoal.init("ddp", accumulate=accumulate, announce=lambda _: None)
    torch.manual_seed(0)
    model = nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Scenes(), 4, collate_fn=boxes_alone)
    model, optimizer, loader = run.prepare(model, optimizer, loader)

    def loss_of(images: Tensor, boxes: list[Tensor]) -> Tensor:
        pairs = zip(images, boxes, strict=True)
        return torch.stack(
            [(model(own) * image.sum()).square().sum() for image, own in pairs]
        ).mean()

    losses = []
    for images, boxes in loader:
        optimizer.zero_grad()
        batch = images, [own.clone() for own in boxes]  # moved to a device, as such scripts do
        if by_function:
            loss = run.forward_backward(loss_of, *batch)
        else:
            loss = sum(run.backward(loss_of(*part)) for part in run.microbatches(batch))
        losses.append(float(loss))
        optimizer.step()
    return [*losses, *model.weight.flatten().tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("by_function", [True, False])
def test_two_images_with_two_boxes_each_are_no_columns(by_function: bool) -> None:
    expected = trained_on_boxes(1, True)
    for results in world.run(2, in_turn, trained_on_boxes, (1, by_function), (2, by_function)):
        for found in results:
            assert found == pytest.approx(expected, rel=1e-10)


def targets(count: int = 2) -> list[dict[str, Tensor]]:
    return [{"boxes": torch.full((2, 4), float(index))} for index in range(count)]


def test_a_list_that_can_only_hold_samples_tells_of_those_beside_it() -> None:
    images = [torch.zeros(3, 4, 4), torch.zeros(3, 5, 4)]
    (own_images, own_targets), _ = share_batch((images, targets()), rank=1, ranks=2)
    assert len(own_images) == len(own_targets) == 1
    assert torch.equal(own_targets[0]["boxes"], torch.ones(2, 4))


def test_what_nothing_tells_is_refused_where_rows_are_taken() -> None:
    batch = (torch.zeros(2, 3), targets())
    with pytest.raises(UsageError, match="can hold 2 samples or 2 columns"):
        share_batch(batch, rank=0, ranks=2)
    named, _ = share_batch((batch[0], dict(zip("ab", batch[1], strict=True))), rank=1, ranks=2)
    assert named[1]["b"]["boxes"].shape == (1, 4)


def test_lists_that_are_clear_keep_their_class() -> None:
    batch = (torch.zeros(3, 3), targets(3), [torch.zeros(3), torch.zeros(3)])
    assert mark_sample_lists(batch, nothing_known) is batch
    marked = mark_sample_lists((targets(),), lambda length: length == 2)
    assert type(marked[0]) is SampleList
    assert type(mark_sample_lists((targets(),), lambda _: False)[0]) is list
    columns = ([torch.zeros(2), torch.zeros(2)],)
    assert type(mark_sample_lists(columns, nothing_known)[0]) is list
