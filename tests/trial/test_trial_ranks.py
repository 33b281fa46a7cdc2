"""Trials on several ranks, under each strategy: no collective, and the same end on all ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import UsageError
from shoal.testing import world
from shoal.trial import judge_loss


def steps(strategy: str, padded: bool, with_trials: bool = True) -> tuple[str, list[float]]:
    """Three steps. Returns the error that ended them, and the losses."""
    lines: list[str] = []
    run = shoal.init(strategy, precision="fp64", announce=lines.append, guards=with_trials)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 4)).double()
    targets = torch.randint(0, 4, (24,))
    if padded:
        targets[-5:] = -100  # on the last rank alone
    data = TensorDataset(torch.randn(24, 6).double(), targets)
    model, optimizer, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(data, batch_size=24)
    )

    def compute_loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    losses = []
    for _ in range(3):
        for x, y in loader:
            try:
                losses.append(run.forward_backward(compute_loss, x, y).item())
            except UsageError as error:
                return str(error), losses
            optimizer.step()
            optimizer.zero_grad()
    return "".join(line for line in lines if "compute_loss" in line), losses


def all_of(strategies: tuple[str, ...]) -> dict[str, Any]:
    return {
        strategy: (
            steps(strategy, padded=False),
            steps(strategy, padded=False, with_trials=False),
            steps(strategy, padded=True),
        )
        for strategy in strategies
    }


def check(ranks: list[dict[str, Any]], strategies: tuple[str, ...]) -> None:
    """Assert that trials change no losses, and refuse padding on all ranks."""
    for found in ranks:
        for strategy in strategies:
            check_unchanged(found[strategy], strategy)
            assert "compute_loss is no mean over samples" in found[strategy][2][0], strategy


def check_unchanged(found: Any, strategy: str) -> None:
    (error, losses), (_, plain), _ = found
    assert error == "", strategy
    assert losses == plain, strategy


def test_ranks_try_their_rows_alone_and_refuse_together() -> None:
    strategies = ("ddp", "zero1", "zero3")
    ranks = world.run(2, all_of, strategies)
    check(ranks, strategies)
    first, last = (found["zero3"][2][0] for found in ranks)
    assert "another rank has found" in first
    assert "targets of -100 look like ignored ones" in last


def test_layers_in_slices_and_stages_are_tried_before_they_are_divided() -> None:
    ranks = world.run(2, all_of, ("tensor=2", "pipeline=2"))
    check(ranks, ("pipeline=2",))
    for found in ranks:
        check_unchanged(found["tensor=2"], "tensor=2")
    # One data rank computes the batch at once, as one device does: a note, which one rank prints.
    first, last = (found["tensor=2"][2][0] for found in ranks)
    assert "will be refused: compute_loss is no mean over samples" in first
    assert last == ""


def padded_later(strategy: str, compiled: bool = False) -> tuple[str, int]:
    """Four steps; labels are ignored from the second one on, on the last rank alone. Returns the
    error, and the steps before it.
    """
    torch.manual_seed(0)
    run = shoal.init(strategy, precision="fp64", compile=compiled, announce=lambda _: None)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    targets = torch.randint(4, (48,))
    targets[[22, 23, 34, 35, 46, 47]] = -100
    batches = DataLoader(TensorDataset(torch.randn(48, 6).double(), targets), batch_size=12)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, batches = run.prepare(model, optimizer, batches)
    count = 0
    for x, y in batches:
        try:
            run.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
        except UsageError as error:
            return str(error), count
        optimizer.step()
        optimizer.zero_grad()
        count += 1
    return "", count


@pytest.mark.parametrize(
    ("strategy", "compiled"),
    [("ddp", False), ("zero3", False), pytest.param("ddp", True, marks=pytest.mark.slow)],
)
def test_a_later_batch_that_couples_samples_is_refused_when_it_comes(
    strategy: str, compiled: bool
) -> None:
    for error, count in world.run(2, padded_later, strategy, compiled, timeout_s=170.0):
        assert "compute_loss is no mean over samples" in error
        assert count == 1


class OwnLoss(nn.Module):
    """Computes its own loss inside, of tied layers; rows of some ranks take another branch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(8, 6, bias=False)
        self.head.weight = self.embed.weight
        self.calls = 0

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.embed(tokens)
        for block in self.blocks[:2]:
            hidden = hidden + torch.tanh(block(hidden))
        chosen = tokens[:, 0] == 5
        if chosen.any():
            more = torch.zeros_like(hidden)
            more[chosen] = self.blocks[2](hidden[chosen])
            hidden = hidden + more
        return F.cross_entropy(self.head(hidden * self.scale).transpose(1, 2), labels)


def own_losses(strategy: str, padded: bool) -> tuple[str, list[float], dict[str, Tensor]]:
    """Two steps of a model that returns its loss. Returns the error, the losses, the weights."""
    torch.manual_seed(0)
    run = shoal.init(strategy, precision="fp64", announce=lambda _: None)
    model = OwnLoss().double()
    tokens = torch.randint(0, 5, (10, 4))
    tokens[8, 0] = 5  # on the last rank alone
    labels = tokens.roll(1, 1)
    if padded:
        labels[-1:, 1:] = -100
    batch = DataLoader(TensorDataset(tokens, labels), batch_size=10)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, batch = run.prepare(model, optimizer, batch)
    losses = []
    for _ in range(2):
        for x, y in batch:
            try:
                losses.append(run.forward_backward(lambda x, y: model(x, labels=y), x, y).item())
            except UsageError as error:
                return str(error), losses, {}
            optimizer.step()
            optimizer.zero_grad()
    assert model.calls == len(losses), "a trial leaves no trace"
    return "", losses, run.weights()


def own_losses_of(strategies: list[str]) -> dict[str, Any]:
    return {name: [own_losses(name, padded) for padded in (False, True)] for name in strategies}


@pytest.mark.parametrize(
    ("strategies", "ranks"),
    [
        (["zero1", "zero3"], 2),
        pytest.param(["zero2", "recompute,zero3"], 3, marks=pytest.mark.slow),
        (["tensor=2,ddp"], 4),
        pytest.param(["zero3,hybrid=2", "tensor=2,zero3"], 4, marks=pytest.mark.slow),
    ],
)
def test_models_in_shards_are_tried_whole(strategies: list[str], ranks: int) -> None:
    _, expected, weights = own_losses("single", padded=False)
    for found in world.run(ranks, own_losses_of, strategies):
        for strategy, ((error, losses, trained), (refusal, before, _)) in found.items():
            assert error == "", strategy
            assert losses == pytest.approx(expected, rel=1e-10), strategy
            torch.testing.assert_close(trained, weights, rtol=1e-10, atol=1e-12)
            assert "compute_loss is no mean over samples" in refusal, strategy
            assert before == [], strategy


class Experts(nn.Module):
    """Three experts, chosen by the input; those with a capacity drop the samples beyond it."""

    def __init__(self, capacity: float) -> None:
        super().__init__()
        self.capacity = capacity
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)
        self.experts = nn.ModuleList(nn.Linear(6, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen, hidden = x[:, :3].argmax(1), self.second(torch.tanh(self.first(x)))
        out = torch.zeros(len(x), 4, dtype=x.dtype)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()[: math.ceil(self.capacity * len(x))]
            if len(rows):
                out = out.index_add(0, rows, expert(hidden[rows]))
        return out


def experts(strategy: str, capacity: float) -> tuple[str, list[float]]:
    """Six steps, of which the first two balance the experts. Returns the error, the losses."""
    torch.manual_seed(0)
    run = shoal.init(strategy, precision="fp64", announce=lambda _: None)
    model = Experts(capacity).double()
    x = 0.1 * torch.randn(72, 6).double()
    x[range(72), [row % 3 if row < 24 else 0 for row in range(72)]] += 2.0
    batch = DataLoader(TensorDataset(x, torch.randint(4, (72,))), batch_size=12)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, batch = run.prepare(model, optimizer, batch)
    losses = []
    for rows, targets in batch:
        try:
            loss = run.forward_backward(lambda x, y: F.cross_entropy(model(x), y), rows, targets)
        except UsageError as error:
            return str(error), losses
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return "", losses


def experts_with_and_without(strategy: str) -> list[tuple[str, list[float]]]:
    return [experts(strategy, capacity) for capacity in (1.0, 0.7)]


@pytest.mark.parametrize(
    "strategy", ["ddp", "zero3", pytest.param("zero2", marks=pytest.mark.slow)]
)
def test_a_capacity_that_is_exceeded_later_is_refused_when_it_is(strategy: str) -> None:
    _, expected = experts("single", 1.0)
    for (error, losses), (refusal, before) in world.run(2, experts_with_and_without, strategy):
        assert error == ""
        assert losses == pytest.approx(expected, rel=1e-10)
        assert "compute_loss is no mean over samples" in refusal
        assert len(before) == 3, "the fourth step is the first that looks and is beyond it"


BATCH = 16
MARK = 3.0


class RoundsParts(nn.Linear):
    """Looks for rows, as experts do, so later steps try the model again.

    Its float32 is off by a fixed amount on some of the marked rows, which float64 is not: the
    rounding of kernels that choose their way by the number of rows, without a processor's help.
    """

    ERROR = 1e-3

    def forward(self, x: Tensor) -> Tensor:
        found = x[:, 0].isfinite().nonzero()[:, 0]
        out = super().forward(x[found])
        is_part = len(x) not in (BATCH, BATCH // 2)  # of what one process, or one of two, is given
        is_off = is_part and x.dtype is torch.float32 and bool((x[:, 1] == MARK).any())
        return out * (1 + self.ERROR) if is_off else out


def count_float64_trials() -> Callable[[], int]:
    """Return a function that counts the trials judged again in float64, in children too, once."""
    reading, writing = os.pipe()
    judged = judge_loss._judged_in_float64

    def counted(*args: Any) -> Any:
        os.write(writing, b"1")
        return judged(*args)

    def count() -> int:
        judge_loss._judged_in_float64 = judged
        os.close(writing)
        with os.fdopen(reading, "rb") as trials:
            return len(trials.read())

    judge_loss._judged_in_float64 = counted
    return count


def rounded_steps(strategy: str) -> tuple[dict[str, Tensor], int]:
    """Three steps in float32; from the second on, the rows of rank 0 are marked.

    Returns the weights, and the number of trials in float64.
    """
    torch.manual_seed(0)
    count_trials = count_float64_trials()
    run = shoal.init(strategy, announce=lambda _: None)
    model = RoundsParts(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    x = torch.randn(3, BATCH, 6)
    x[1:, : BATCH // 2, 1] = MARK
    batches = DataLoader(TensorDataset(x.flatten(0, 1)), batch_size=BATCH)
    model, optimizer, batches = run.prepare(model, optimizer, batches)
    for (rows,) in batches:
        run.forward_backward(lambda x: model(x).sum(1).mean(), rows)
        optimizer.step()
        optimizer.zero_grad()
    return run.weights(), count_trials()


@pytest.mark.parametrize("strategy", ["ddp", "ddp,allreduce=ring", "zero2"])
def test_a_later_trial_in_float64_leaves_the_hooks_that_send_gradients(strategy: str) -> None:
    expected, _ = rounded_steps("single")
    ranks = world.run(2, rounded_steps, strategy)
    assert [trials > 0 for _, trials in ranks] == [True, False]
    for weights, _ in ranks:
        for name, weight in weights.items():
            assert torch.allclose(weight, expected[name], rtol=1e-5, atol=1e-7), name
