"""Time-first batches, outputs and labels that are none, zero gradients, attention, no dropout."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from any_step import assert_same
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import UsageError
from shoal.testing import world
from shoal.trial import LossKind, try_loss
from shoal.trial.loss_verdict import OBJECTIONS
from tests.harness.in_turn import in_turn


class TimeFirst(nn.Module):
    """Tokens (time, samples) to scores (time, samples, 6)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.embedding(x).tanh())
        return scores


def tokens(padded: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = [3 + i % 5 if padded else 5 for i in range(24)]
    return [torch.randint(1, 6, (length,), generator=generator) for length in lengths]


def pad(batch: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(batch, padding_value=0)


def time_first(strategy: str, padded: bool) -> tuple[str, dict[str, Tensor]]:
    """Return the error, or the weights after an epoch of batches (time, samples)."""
    run = shoal.init(strategy, precision="fp64", announce=lambda _: None)
    torch.manual_seed(0)
    model = TimeFirst().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(tokens(padded), 8, collate_fn=pad)  # type: ignore[arg-type]
    model, optimizer, loader = run.prepare(model, optimizer, loader)

    def compute_loss(x: Tensor) -> Tensor:
        scores, labels = model(x[:-1]).flatten(0, 1), x[1:].flatten()
        return F.cross_entropy(scores, labels, ignore_index=0)

    for x in loader:
        optimizer.zero_grad()
        try:
            run.forward_backward(compute_loss, x)
        except UsageError as error:
            return str(error), {}
        optimizer.step()
    return "", run.weights()


def test_a_mean_over_what_is_no_padding_is_refused_with_time_first() -> None:
    for error, _ in world.run(2, time_first, "ddp", True):
        assert error.startswith("compute_loss is no mean over samples"), error


def test_a_mean_over_samples_is_exact_with_time_first() -> None:
    _, expected = time_first("single", False)
    for error, weights in world.run(2, time_first, "ddp", False):
        assert error == ""
        assert_same(weights, expected)


class TwoTasks(nn.Module):
    """Two tasks weighed by learned variances, which the model returns beside their outputs."""

    def __init__(self, computed: bool) -> None:
        super().__init__()
        self.computed = computed
        self.body, self.log_var = nn.Linear(8, 3), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.body(x)
        return h[:, :2], h[:, 2], self.log_var * 1.0 if self.computed else self.log_var


def two_tasks(strategy: str, computed: bool) -> tuple[str, dict[str, Tensor]]:
    """Return the error, or the weights: two samples on each of two ranks, as many as tasks."""
    run = shoal.init(strategy, precision="fp64", announce=lambda _: None)
    torch.manual_seed(0)
    model: Any = TwoTasks(computed).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(
        torch.randn(16, 8).double(), torch.arange(16) % 2, torch.randn(16).double()
    )
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, 4))

    def compute_loss(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        logits, value, v = model(x)
        first, second = F.cross_entropy(logits, y), F.mse_loss(value, z)
        loss: Tensor = first * torch.exp(-v[0]) + second * torch.exp(-v[1]) + v[0] + v[1]
        return loss

    for batch in loader:
        optimizer.zero_grad()
        try:
            run.forward_backward(compute_loss, *batch)
        except UsageError as error:
            return str(error), {}
        optimizer.step()
    return "", run.weights()


def test_an_output_without_samples_may_have_as_many_entries_as_there_are() -> None:
    expected = [two_tasks("single", computed)[1] for computed in (False, True)]
    for results in world.run(2, in_turn, two_tasks, ("ddp", False), ("ddp", True)):
        for (error, weights), alone in zip(results, expected, strict=True):
            assert error == ""
            assert_same(weights, alone)


def student_of_itself() -> list[str]:
    """Train a student that begins as a copy of its teacher; return the notes on the loss."""
    lines: list[str] = []
    run = shoal.init("ddp", announce=lines.append)
    torch.manual_seed(0)
    student: Any = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(66, 8)), 22)
    student, optimizer, loader = run.prepare(student, optimizer, loader)

    def compute_loss(x: Tensor) -> Tensor:
        log_probabilities = student(x).log_softmax(1)
        return F.kl_div(log_probabilities, teacher(x).softmax(1), reduction="batchmean")

    for (x,) in loader:
        run.forward_backward(compute_loss, x)
        optimizer.step()
    return [line for line in lines if "compute_loss" in line]


def test_a_loss_whose_gradient_is_zero_is_not_refused() -> None:
    notes, _ = world.run(2, student_of_itself)
    assert all("its gradients are zero but for rounding" in note for note in notes), notes


def attention(draws: str) -> tuple[list[str], dict[str, Tensor]]:
    lines: list[str] = []
    run = shoal.init("ddp", precision="fp64", announce=lines.append, draws=draws)  # type: ignore
    torch.manual_seed(0)
    model: Any = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(torch.randn(12, 4, 8).double(), 6)  # type: ignore[arg-type]
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for x in loader:
        optimizer.zero_grad()
        run.forward_backward(lambda x: model(x).square().mean(), x)
        optimizer.step()
    return [line for line in lines if "random numbers" in line], run.weights()


def test_attention_without_dropout_draws_nothing_and_is_exact() -> None:
    expected = [attention(draws)[1] for draws in ("rank", "global")]
    for results in world.run(2, in_turn, attention, ("rank",), ("global",)):
        for (notes, weights), alone in zip(results, expected, strict=True):
            assert notes == []
            for name, value in alone.items():
                tolerance = 1e-10 * value.abs().max() + 1e-14
                assert (weights[name] - value).abs().max() <= tolerance, name


class TimeFirstLabels(nn.Module):
    """Sequences (time, samples, 3) to scores (samples, 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.GRU(3, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.body(x)[1][0])
        return scores


def verdict_on_square(weight: Tensor | None, in_parts: bool) -> LossKind:
    """Return the verdict on sequences as long as the batch has samples."""
    torch.manual_seed(0)
    model = TimeFirstLabels()
    x, y = torch.randn(6, 6, 3), torch.arange(6) % 2

    def compute_loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, weight=weight)

    given = compute_loss, (x, y), {}, 6, [model]
    return try_loss(*given, in_parts=in_parts).kind


def test_sequences_as_long_as_the_batch_may_have_their_samples_in_either_dimension() -> None:
    assert verdict_on_square(None, in_parts=False) is LossKind.MEAN
    assert verdict_on_square(torch.tensor([1.0, 9.0]), in_parts=False) in OBJECTIONS
    # Micro-batches are cut along dimension 0, so there it must be the samples.
    assert verdict_on_square(None, in_parts=True) in OBJECTIONS


def test_a_mean_of_no_label_times_a_count_of_none_adds_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 5).double()
    x, labels = torch.randn(8, 12, 6).double(), torch.full((8, 12), -100)
    for row, count in enumerate((4, 0, 2, 3, 0, 2, 2, 3)):
        labels[row, :count] = torch.randint(0, 5, (count,))

    def compute_loss(x: Tensor, labels: Tensor) -> Any:
        count = labels.ne(-100).sum()
        mean = F.cross_entropy(model(x).flatten(0, 1), labels.flatten())  # NaN where it is of none
        return shoal.counted(mean * count, count)

    assert try_loss(compute_loss, (x, labels), {}, 8, [model]).kind is LossKind.COUNTED
