"""`run.backward(loss)` refuses a loss that is no mean over samples, as far as its graph tells."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import UsageError
from shoal.testing import world
from tests.harness.in_turn import in_turn

IGNORED = -100


class LanguageModel(nn.Module):
    """Scores of tokens, and the mean loss of those that count, as transformers return them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        self.head = nn.Linear(8, 7)

    def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        scores = self.head(self.embedding(tokens))
        loss = F.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        return {"loss": loss, "scores": scores}


def prepared(strategy: str, first_padding: int = 0, **settings: Any) -> tuple[Any, ...]:
    """Return run, model, optimizer and loader of eight steps.

    Args: first_padding: step in which targets that do not count come first.
    """
    torch.manual_seed(0)
    run = shoal.init(strategy, announce=lambda _: None, **settings)
    model = LanguageModel().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(0, 7, (8 * 4, 5), generator=torch.Generator().manual_seed(1))
    targets = tokens.roll(1, 1)
    for row in range(first_padding * 4, len(targets)):
        targets[row, 1 + row % 4 :] = IGNORED
    loader = DataLoader(TensorDataset(tokens, targets), batch_size=4)
    return run, *run.prepare(model, optimizer, loader)


def refusal(strategy: str, settings: dict[str, Any], first_padding: int) -> tuple[int, str]:
    """Return the step in which a loop ends, and its error; without one, the number of steps."""
    run, model, optimizer, loader = prepared(strategy, first_padding, **settings)
    step = 0
    for batch in loader:
        optimizer.zero_grad()
        try:
            for tokens, targets in run.microbatches(batch):
                run.backward(model(tokens, targets)["loss"])
        except UsageError as error:
            return step, str(error)
        optimizer.step()
        step += 1
    return step, ""


def test_a_token_mean_that_a_model_returns_is_refused_with_each_ranks_count() -> None:
    calls = [(strategy, {}, 0) for strategy in ("ddp", "zero3", "server=1")]
    for refusals in world.run(2, in_turn, refusal, *calls):
        for step, text in refusals:
            assert step == 0
            # 1 + 2 tokens of the first rank's rows count, and 3 + 4 of the second one's.
            assert "(cross_entropy): rank 0 by 3 for 2 samples, rank 1 by 7 for 2 samples" in text


def test_micro_batches_of_one_process_are_compared() -> None:
    step, text = refusal("single", {"accumulate": 2}, 0)
    assert step == 0
    assert re.search("rank 0, micro-batch 0 by 3 .* rank 0, micro-batch 1 by 7", text)


def test_padding_that_comes_late_is_seen_at_the_next_comparison() -> None:
    for step, text in world.run(2, refusal, "ddp", {}, 5):
        assert step == 7  # the eighth call
        assert "rank 1 by 7" in text


def test_without_guards_and_over_equal_counts_a_token_mean_trains() -> None:
    calls = ("ddp", {"guards": False}, 0), ("ddp", {}, 8)
    assert world.run(2, in_turn, refusal, *calls) == [[(8, "")] * 2] * 2


def test_one_process_trains_a_token_mean() -> None:
    assert refusal("single", {}, 0) == (8, "")


def train(form: str) -> dict[str, Tensor]:
    run, model, optimizer, loader = prepared("ddp")

    def compute_loss(tokens: Tensor, targets: Tensor) -> Any:
        output = model(tokens, targets)
        if form != "counted":
            return output["loss"]
        scores, flat = output["scores"].flatten(0, 1), targets.flatten()
        total = F.cross_entropy(scores, flat, ignore_index=IGNORED, reduction="sum")
        return shoal.counted(total, (flat != IGNORED).sum())

    for batch in loader:
        optimizer.zero_grad()
        if form == "function":
            run.forward_backward(compute_loss, *batch, reduction="ranks")
        else:
            reduction = "rows" if form == "counted" else "ranks"
            run.backward(compute_loss(*batch), reduction=reduction)
        optimizer.step()
    return run.weights()


def test_the_mean_of_the_ranks_means_is_trained_on_request() -> None:
    for expected, weights in world.run(2, in_turn, train, ("function",), ("loop",)):
        torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-14)


def test_the_cure_that_the_refusal_names_trains_as_on_one_device() -> None:
    expected = train("counted")
    for weights in world.run(2, train, "counted"):
        torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-12)


def sum_of_samples() -> str:
    run = shoal.init("ddp", announce=lambda _: None)
    model = nn.Linear(4, 3)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UsageError) as error:
        run.backward(model(torch.ones(4, 4)).square().sum())
    return str(error.value)


def test_a_sum_over_samples_is_refused() -> None:
    for text in world.run(2, sum_of_samples):
        assert "a sum over samples (sum)" in text
        assert "loss / len(x)" in text


def share_of_a_mean(factor: float | None, divisor: float) -> str:
    """Train a mean that is multiplied and divided by numbers. Args: factor: None for len(x)."""
    run = shoal.init("ddp", announce=lambda _: None)
    model = nn.Linear(5, 3).double()
    loader = DataLoader(TensorDataset(torch.rand(12, 5).double()), batch_size=12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for (x,) in loader:
        by = len(x) if factor is None else factor
        try:
            run.backward(F.mse_loss(model(x), x[:, :3]) * by / divisor)
        except UsageError as error:
            return str(error)
    return ""


def test_a_mean_that_is_made_a_share_of_the_batch_is_refused_with_the_cure() -> None:
    for text in world.run(2, share_of_a_mean, None, 12):
        assert "a mean (MseLoss) that is multiplied by the samples of this rank" in text
        assert "and divided by those of all, 12." in text
        assert "run.backward(loss) without the two numbers" in text


def test_a_mean_with_another_weight_is_not() -> None:
    weights = (6.0, 1.0), (6.0, 4.0), (0.5, 1.0), (1.0, 12.0)
    assert world.run(2, in_turn, share_of_a_mean, *weights) == [[""] * 4] * 2


def notes_on_micro_batches(divisor: float, terms: int) -> list[str]:
    """Return the notes on a division of losses of micro-batches."""
    lines: list[str] = []
    run = shoal.init("single", accumulate=3, announce=lines.append)
    model = nn.Linear(5, 3)
    optimizer, loader = (
        torch.optim.SGD(model.parameters(), lr=0.1),
        DataLoader(torch.rand(12, 5), 6),
    )
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for batch in loader:
        for x in run.microbatches(batch):
            loss = sum(F.mse_loss(model(x), x[:, :3]) for _ in range(terms)) / divisor
            run.backward(loss)
        optimizer.step()
    return [line for line in lines if "is divided by" in line]


def test_a_division_by_the_number_of_micro_batches_is_noted_once() -> None:
    (note,) = notes_on_micro_batches(3, 1)
    assert "divided by 3, as many as the micro-batches of a step" in note
    assert notes_on_micro_batches(2, 1) == []
    assert notes_on_micro_batches(3, 3) == []  # a mean of three losses


def weighs_by_its_losses(of_all: bool) -> str:
    """Train a difference of two losses with a weight that follows from them, as BEGAN does."""
    torch.manual_seed(0)
    run = shoal.init("ddp", announce=lambda _: None)
    model = nn.Linear(4, 4).double()
    data = DataLoader(torch.arange(64.0, dtype=torch.float64).view(16, 4).sin(), batch_size=8)
    model, optimizer, data = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    weight = 0.0
    for x in data:
        optimizer.zero_grad()
        loss = (model(x) - x).abs().mean() - weight * model(x).abs().mean()
        try:
            mean = run.backward(loss)
        except UsageError as error:
            return str(error)
        optimizer.step()
        weight += float(mean if of_all else loss.detach())
    return ""


def test_a_weight_that_each_rank_computes_from_its_own_losses_is_refused() -> None:
    for of_own, of_all in world.run(2, in_turn, weighs_by_its_losses, (False,), (True,)):
        assert "each rank multiplies a term (mean) by another number: rank 0 by" in of_own
        assert of_all == ""


def couples_gathered_rows() -> Tensor:
    """Train a loss of which every rank computes the whole, from the rows of all."""
    torch.manual_seed(0)
    run = shoal.init("ddp", announce=lambda _: None)
    model = nn.Linear(4, 3).double()
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.arange(24.0, dtype=torch.float64).view(6, 4).sin()
    mine = x[run.rank * 6 // run.world_size : (run.rank + 1) * 6 // run.world_size]
    output = run.gather(model(mine))
    correlation = output.T @ output / len(output)
    run.backward((correlation - torch.eye(3)).square().sum() + 1 - output.sum() / x.sum())
    optimizer.step()
    return run.weights()["weight"]


def test_a_sum_over_gathered_rows_is_the_same_on_every_rank() -> None:
    expected = couples_gathered_rows()
    for weight in world.run(2, couples_gathered_rows):
        torch.testing.assert_close(weight, expected, rtol=1e-10, atol=1e-12)


def notes_without_a_loader() -> list[str]:
    lines: list[str] = []
    run = shoal.init("ddp", announce=lines.append)
    model = nn.Linear(4, 3)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run.backward(model(torch.ones(4, 4)).square().mean())
    return lines


def test_batches_that_are_the_same_on_all_ranks_are_told_once() -> None:
    lines = world.run(2, notes_without_a_loader)[0]
    assert sum("all ranks" in line and "same" in line for line in lines) == 1


def contrastive(strategy: str, settings: dict[str, Any], gathers: bool) -> str | Tensor:
    """Train by a loss that compares samples with one another. Return its refusal, or weights."""
    torch.manual_seed(0)
    run = shoal.init(strategy, announce=lambda _: None, **settings)
    model = nn.Linear(5, 3).double()
    samples = torch.arange(8 * 5, dtype=torch.float64).view(8, 5).sin()
    loader = DataLoader(TensorDataset(samples), batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for batch in loader:
        for (x,) in run.microbatches(batch):
            output = model(x)
            features = F.normalize(run.gather(output) if gathers else output)
            loss = F.cross_entropy(features @ features.T, torch.arange(len(features)))
            try:
                run.backward(loss)
            except UsageError as error:
                return str(error)
        optimizer.step()
    return run.weights()["weight"]


def test_samples_that_are_compared_are_refused() -> None:
    calls = [(strategy, {}, False) for strategy in ("ddp", "zero3", "server=1")]
    for texts in world.run(2, in_turn, contrastive, *calls):
        for text in texts:
            assert "samples influence one another (rank 0)" in text
            assert "run.gather(output)" in text
            assert "on chunks that cut across samples, give the loss as a function" in text
    text = str(contrastive("single", {"accumulate": 2}, False))
    assert "samples influence one another (rank 0, micro-batch 0)" in text
    assert "run.gather(output)" in text


def two_views() -> str:
    """Compare two views of each sample, which go through the model one behind the other."""
    torch.manual_seed(0)
    run = shoal.init("ddp", announce=lambda _: None)
    model = nn.Linear(5, 3)
    loader = DataLoader(TensorDataset(torch.rand(8, 5)), batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    (x,) = next(iter(loader))
    first, second = F.normalize(model(torch.cat([x, x.cos()]))).split(len(x))
    run.backward((1 - (first * second).sum(1)).square().mean())  # of the same sample
    first, second = F.normalize(model(torch.cat([x, x.cos()]))).split(len(x))
    with pytest.raises(UsageError) as error:
        run.backward(F.cross_entropy(first @ second.T, torch.arange(len(x))))
    return str(error.value)


def test_views_of_other_samples_are_refused_and_those_of_one_sample_are_not() -> None:
    for text in world.run(2, two_views):
        assert "samples influence one another (rank 0)" in text


def test_the_same_with_rows_of_all_ranks_trains_as_on_one_device() -> None:
    expected = contrastive("single", {}, False)
    for weight in world.run(2, contrastive, "ddp", {}, True):
        torch.testing.assert_close(weight, expected, rtol=1e-10, atol=1e-12)


def gathered_in_parts() -> tuple[str, int]:
    """Return the error of a contrastive loss of micro-batches; and how often rows without a
    gradient get a note.
    """
    lines: list[str] = []
    run = shoal.init("ddp", accumulate=2, announce=lines.append)
    model = run.prepare(nn.Linear(3, 4))
    x = run.share(torch.randn(8, 3))
    part = next(run.microbatches(x))
    for _ in range(2):
        assert len(run.gather(part)) == 4
    with pytest.raises(UsageError) as raised:
        run.gather(model(part))
    return str(raised.value), sum("rows of one micro-batch of all ranks" in line for line in lines)


def test_a_loss_of_the_gathered_rows_of_micro_batches_is_refused() -> None:
    for rank, (said, notes) in enumerate(world.run(2, gathered_in_parts)):
        assert "run.forward_backward(compute_loss, *batch); or use accumulate=1" in said
        assert notes == (rank == 0)


def weights_of_gathered_rows(of_all: bool) -> str:
    """Train by the loss of all rows, with weights of classes by what a rank has predicted."""
    torch.manual_seed(0)
    run = shoal.init("ddp", announce=lambda _: None)
    model = nn.Linear(5, 3).double()
    x = torch.arange(60, dtype=torch.float64).view(12, 5).sin()
    data = DataLoader(TensorDataset(x, torch.arange(12) % 3), batch_size=12)
    model, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1), data)
    weight = torch.ones(3).double()
    for _ in range(4):
        for x, y in loader:
            scores, labels = run.gather(model(x)), run.gather(y)
            try:
                run.backward(F.cross_entropy(scores, labels, weight, reduction="none").mean())
            except UsageError as error:
                return str(error)
            optimizer.step()
            optimizer.zero_grad()
            found = (scores if of_all else model(x)).detach().softmax(1).mean(0)
            weight = 1 / (found + 0.1)
    return ""


def test_losses_of_all_rows_that_differ_on_ranks_are_refused() -> None:
    for of_own, of_all in world.run(2, in_turn, weights_of_gathered_rows, (False,), (True,)):
        assert "and it is not the same: rank 0 " in of_own
        assert of_all == ""


def penalised(kind: str, strategy: str) -> Any:
    """Return the weights of a critic with a gradient penalty after two steps, or the error."""
    torch.manual_seed(0)
    run = shoal.init(strategy, announce=lambda _: None)
    critic = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    samples = torch.arange(24, dtype=torch.float64).sin().view(8, 3)
    critic, optimizer = run.prepare(critic, torch.optim.SGD(critic.parameters(), lr=0.1))
    x = run.share(samples)
    for _ in range(2):
        optimizer.zero_grad()
        inputs = x.clone().requires_grad_()
        scores = critic(inputs)
        scored = scores.mean() if kind == "of a mean" else scores.sum()
        (gradient,) = torch.autograd.grad(scored, inputs, create_graph=True)
        norms = gradient.norm() if kind == "of all samples" else gradient.norm(dim=1)
        try:
            run.backward(scores.mean() + (norms - 1).square().mean())
        except UsageError as error:
            return str(error)
        optimizer.step()
    return run.weights()


def test_a_gradient_penalty_is_one_of_each_sample_or_is_refused() -> None:
    kinds = ("of each", "of a mean", "of all samples")
    expected = penalised("of each", "single")
    for strategy in ("ddp", "zero3"):
        calls = [(kind, strategy) for kind in kinds]
        for of_each, of_a_mean, of_all in world.run(2, in_turn, penalised, *calls):
            torch.testing.assert_close(of_each, expected, rtol=1e-10, atol=1e-12)
            assert "Take the gradients of a sum" in of_a_mean
            assert "samples influence one another" in of_all
