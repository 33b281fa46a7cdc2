"""Sizes of batches that are shared out without a loader, and of lists of images."""

from types import SimpleNamespace
from typing import Any

import torch

import shoal
from shoal.data.sharded_loader import YieldWatch
from shoal.errors import UsageError
from shoal.run.batch_size import BatchHistory, BatchSizes
from shoal.testing import world


def sizes_on(rank: int) -> BatchSizes:
    data: Any = SimpleNamespace(rank=rank, size=2)
    return BatchSizes([], data, YieldWatch(), BatchHistory())


def test_rows_of_a_shared_batch_are_known_also_on_another_device() -> None:
    sizes = sizes_on(rank=1)
    batches = [{"x": torch.arange(rows * 2).view(rows, 2)} for rows in (5, 1, 4)]
    locals_ = [sizes.share(batch) for batch in batches]
    assert [len(local["x"]) for local in locals_] == [2, 1, 2]
    found = [sizes.resolve([local], None) for local in locals_]
    assert found == [(2, 5, True), (0, 1, True), (2, 4, True)]
    moved = locals_[0]["x"].clone()
    sizes.track(locals_[0]["x"], moved)
    assert sizes.resolve([moved], None)[:2] == (2, 5)


def test_lists_of_images_are_known_by_their_length() -> None:
    sizes = sizes_on(rank=0)
    images = [torch.zeros(3, size, 5) for size in (4, 6, 7)]
    boxes = [{"boxes": torch.zeros(count, 4)} for count in (1, 0, 2)]
    own_images, own_boxes = sizes.share((images, boxes))
    assert [len(own_images), len(own_boxes)] == [2, 2]
    copies = [image.clone() for image in own_images]
    assert sizes.resolve([copies, own_boxes], None)[:2] == (2, 3)
    unknown = sizes_on(rank=0).resolve([images, boxes], None)
    assert (unknown.rows, unknown.is_known) == (3, False)


def share_permuted_rows() -> list[str]:
    """Share rows in an order that each rank draws, and in one that all ranks draw alike."""
    run = shoal.init("ddp", announce=lambda _: None)
    x = torch.arange(24.0).view(12, 2)
    messages = []
    for generator in (None, torch.Generator().manual_seed(1)):
        model = torch.nn.Linear(2, 1)
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        rows = run.share(x[torch.randperm(12, generator=generator)])
        try:
            run.forward_backward(lambda x, model=model: model(x).mean(), rows)
            messages.append("")
        except UsageError as error:
            messages.append(str(error))
    return messages


def test_a_shared_batch_that_is_not_the_same_on_all_ranks_is_refused_on_all() -> None:
    for alone, together in world.run(2, share_permuted_rows):
        assert alone.startswith("run.share was given a batch that is not the same on all ranks.")
        assert not together


def replay(follows_all: bool) -> tuple[str, list[float]]:
    """Share batches that are drawn by priorities, which follow from errors of the steps.

    Returns: the error that ends the loop, and the losses.
    """
    run = shoal.init("ddp", announce=lambda _: None, precision="fp64")
    torch.manual_seed(0)
    x, y = torch.randn(20, 3, dtype=torch.float64), torch.randn(20, dtype=torch.float64)
    model = torch.nn.Linear(3, 1).double()
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    priority, generator = torch.ones(20).double(), torch.Generator().manual_seed(1)
    losses = []

    def compute_loss(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        errors = model(x).squeeze(1) - y
        return errors.square().mean(), errors.detach().abs()

    for _ in range(8):
        index = torch.multinomial(priority, 6, generator=generator)
        part, target, index = run.share((x[index], y[index], index))
        optimizer.zero_grad()
        loss, errors = run.forward_backward(compute_loss, part, target)
        try:
            optimizer.step()
        except UsageError as error:
            return str(error), losses
        losses.append(loss.item())
        if follows_all:
            index, errors = run.gather(index), run.gather(errors)
        priority[index] = errors
    return "", losses


def test_batches_that_become_others_on_each_rank_are_refused_at_a_later_step() -> None:
    for text, losses in world.run(2, replay, False):
        assert text.startswith("run.share was given a batch that is not the same on all ranks")
        assert "priority[run.gather(index)]" in text
        assert 1 <= len(losses) <= 3


def test_priorities_by_errors_of_all_samples_train_as_on_one_device() -> None:
    _, expected = replay(True)
    for text, losses in world.run(2, replay, True):
        assert not text
        assert torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=1e-10, atol=0)


def notes_of_own_batches() -> list[list[str]]:
    """Step on a batch that all ranks compute whole, and on rows that each rank has chosen."""
    found = []
    x = torch.arange(24.0).view(12, 2)
    for is_divided in (False, True):
        notes: list[str] = []
        run = shoal.init("ddp", announce=notes.append)
        model = torch.nn.Linear(2, 1)
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        rows = x[run.rank :: 2] if is_divided else x
        run.forward_backward(lambda x, model=model: model(x).mean(), rows)
        found.append([note for note in notes if "the same rows" in note])
    return found


def test_a_batch_that_all_ranks_compute_whole_is_told_with_the_cure() -> None:
    (whole, divided), _ = world.run(2, notes_of_own_batches)
    assert [note.count("run.share(batch)") for note in whole] == [1]
    assert divided == []
