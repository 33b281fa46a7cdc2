"""A step of any function of the batch: losses of several terms, more values beside the loss, dict
batches, several models and optimizers. Two ranks give the numbers of one, in float64.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from minimal_script import quiet
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import shoal
from shoal.errors import LaunchError, UsageError
from shoal.testing import world
from tests.harness.in_turn import in_turn

Result = dict[str, Tensor]


class Named(Dataset):
    """Samples that are dicts: 4 numbers, a class of 3, and a weight that is often 0."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {
            "x": torch.randn(4, generator=generator, dtype=torch.float64),
            "y": torch.randint(0, 3, (), generator=generator),
            "weight": torch.tensor(float(index % 3 == 0), dtype=torch.float64),
        }


def plain_loop(
    compute_loss: Callable[..., Tensor], params: list[Tensor], steps: int = 3
) -> list[Tensor]:
    """Train by a plain loop over global batches of 5."""
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        for batch in DataLoader(Named(), batch_size=5):
            optimizer.zero_grad()
            loss = compute_loss(**batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return losses


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3).double()


def losses_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def several_terms(accumulate: int = 1) -> tuple[list[float], Tensor]:
    run = shoal.init(announce=lambda _: None, accumulate=accumulate)
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(Named(), batch_size=5))

    def compute_loss(x: Tensor, y: Tensor, weight: Tensor) -> Any:
        losses = losses_of(model, x, y)
        weighed = shoal.counted((losses * weight).sum(), weight.sum())
        ones = shoal.counted((losses * (y == 1)).sum(), (y == 1).sum())
        return weighed + 0.5 * ones + 0.1 * model(x).square().mean()

    found = []
    for _ in range(3):
        for batch in loader:
            optimizer.zero_grad()
            found.append(run.forward_backward(compute_loss, **batch).item())
            optimizer.step()
    return found, model.weight.detach().clone()


def test_terms_with_counts_of_their_own_are_those_of_one_device() -> None:
    model = linear()

    def compute_loss(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        losses = losses_of(model, x, y)
        weighed = (losses * weight).sum() / weight.sum().clamp(min=1)
        ones = (losses * (y == 1)).sum() / (y == 1).sum().clamp(min=1)
        return weighed + 0.5 * ones + 0.1 * model(x).square().mean()

    expected = plain_loop(compute_loss, [*model.parameters()])
    for losses, weight in [
        several_terms(),
        *world.run(2, several_terms),
        *world.run(3, several_terms),
    ]:
        assert losses == pytest.approx([loss.item() for loss in expected], rel=1e-12)
        assert torch.allclose(weight, model.weight, rtol=1e-11, atol=1e-13)


def test_terms_with_counts_of_their_own_need_the_batch_in_one_piece() -> None:
    with pytest.raises(
        UsageError, match=r"3 terms with different counts.*Use accumulate=1, and microbatches=1"
    ):
        several_terms(accumulate=2)


def more_values(accumulate: int) -> list[Any]:
    run = shoal.init(announce=lambda _: None, accumulate=accumulate)
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(Named(), batch_size=5))

    def compute_loss(x: Tensor, y: Tensor, weight: Tensor) -> Any:
        scores = model(x)
        hits = (scores.argmax(1) == y).sum()
        extra = {"scores": scores, "hits": shoal.summed(hits), "mean": scores.mean(), "step": 7}
        return F.cross_entropy(scores, y), extra

    found = []
    for batch in loader:
        _, extra = run.forward_backward(compute_loss, **batch)
        assert not extra["scores"].requires_grad
        assert torch.allclose(extra["scores"], model(batch["x"])[: len(extra["scores"])])
        assert torch.allclose(extra["mean"], extra["scores"].mean())
        assert extra["step"] == 7
        found.append((extra["hits"].item(), len(extra["scores"])))
    return found


def test_values_beside_the_loss_come_back_for_the_samples_of_a_rank() -> None:
    ranks = world.run(2, in_turn, more_values, (1,), (2,))
    for accumulate, (first, second) in enumerate(zip(*ranks, strict=True), start=1):
        hits = [hits for hits, _ in more_values(accumulate)]
        assert [hits for hits, _ in first] == [hits for hits, _ in second] == hits
        assert [rows for _, rows in first] == [3, 3]
        assert [rows for _, rows in second] == [2, 2]


def two_optimizers(strategy: str) -> None:
    run, models = shoal.init(strategy, announce=lambda _: None), (linear(), linear())
    run.prepare(*models, *(torch.optim.SGD(m.parameters(), lr=0.1) for m in models))


def test_servers_take_one_optimizer() -> None:
    with pytest.raises(LaunchError, match="by one optimizer, and 2 were prepared"):
        world.run(2, two_optimizers, "server=1")


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda scores: (scores.sum(), torch.tensor(3.0)), "shoal.counted"),
        (lambda scores: 1.0, "returned a float"),
        (lambda scores: (scores.sum(), 1, 2), "returned 3 values"),
        (lambda scores: shoal.counted(scores.sum(), scores.sum()), "without a gradient"),
        (lambda scores: shoal.counted(scores, 3), "must be a scalar tensor"),
    ],
)
def test_a_function_that_returns_something_else_is_told(returned: Any, words: str) -> None:
    run = quiet()
    model = linear()
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UsageError, match=words):
        run.forward_backward(lambda x: returned(model(x)), torch.ones(2, 4).double())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda run, model, x: run.forward_backward(model(x).sum(), x), "was given a loss"),
        (lambda run, model, x: run.forward_backward(0.5, x), "was given a float"),
        (lambda run, model, x: run.forward_backward(F.mse_loss, model, x), "was given a model"),
        (lambda run, model, x: run.forward_backward(len, x, rows=x), "rows: the number"),
        (lambda run, model, x: run.forward_backward(len, x, reduction="mean"), "reduction: 'mean'"),
    ],
)
def test_wrong_arguments_are_told_with_the_right_form(call: Any, words: str) -> None:
    run = quiet()
    model = linear()
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UsageError, match=words):
        call(run, model, torch.ones(2, 4).double())


def means_of_ranks() -> Tensor:
    run = quiet()
    model = linear()
    model, _, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(Named(), batch_size=5)
    )
    batch = next(iter(loader))

    def compute_loss(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return losses_of(model, x, y).square().mean().sqrt()

    run.forward_backward(compute_loss, **batch, reduction="ranks")
    return model.weight.grad.clone()


def test_ranks_may_count_alike_where_the_loss_is_no_mean() -> None:
    model = linear()
    batch = next(iter(DataLoader(Named(), batch_size=5)))
    for rows in (slice(0, 3), slice(3, 5)):
        losses = losses_of(model, batch["x"][rows], batch["y"][rows])
        (losses.square().mean().sqrt() / 2).backward()
    for found in world.run(2, means_of_ranks):
        assert torch.allclose(found, model.weight.grad, rtol=1e-11)


def notes_on_values(sums: bool) -> list[str]:
    """Return the notes of a loop that computes its accuracy from values beside the loss."""
    lines: list[str] = []
    run = shoal.init("ddp", announce=lines.append)
    model = nn.Linear(4, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(Named(), batch_size=5))

    def compute_loss(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, dict[str, Any]]:
        scores = model(x)
        hits = (scores.argmax(1) == y).sum()
        return F.cross_entropy(scores, y), {"hits": shoal.summed(hits) if sums else hits, "step": 7}

    for batch in loader:
        run.forward_backward(compute_loss, **batch)
    return [line for line in lines if line.startswith("note: what compute_loss returns beside")]


@pytest.mark.slow
def test_values_of_one_rank_beside_the_loss_are_told_once_and_summed_ones_are_not() -> None:
    of_one_rank, summed = world.run(2, in_turn, notes_on_values, (False,), (True,))[0]
    assert len(of_one_rank) == 1
    assert summed == []
