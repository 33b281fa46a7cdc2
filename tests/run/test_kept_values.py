"""What a script keeps from one call of its loss to the next, where a step has micro-batches."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import UsageError
from shoal.testing import world


class Annealed(nn.Module):
    """Lowers its temperature with each forward pass, and makes a table in the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.temperature = 1.0
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, 6, dtype=x.dtype)
        logits = self.net(x + self.table) / self.temperature
        self.temperature *= 0.8
        return logits


class Remembering(Annealed):
    """Keeps what it has computed for the next forward pass."""

    def __init__(self, as_tuple: bool) -> None:
        super().__init__()
        self.as_tuple = as_tuple
        self.hidden: tuple[Tensor, ...] | Tensor = torch.zeros(1, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        before = self.hidden if isinstance(self.hidden, Tensor) else self.hidden[0]
        out = super().forward(x) + before.mean()
        self.hidden = (out.detach(),) if self.as_tuple else out.detach()
        return out


class Criterion:
    def __init__(self) -> None:
        self.calls = 0
        self.samples = 0

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        self.samples += len(y)
        return F.cross_entropy(logits, y) * (1 + 0.1 * self.calls)


def trained(strategy: str, accumulate: int) -> tuple[list[float], tuple[int, int]]:
    run = shoal.init(strategy, precision="fp64", accumulate=accumulate, announce=lambda _: None)
    torch.manual_seed(0)
    model, criterion, weight = Annealed().double(), Criterion(), 0.1
    data = TensorDataset(torch.randn(28, 6).double(), torch.randint(3, (28,)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, 7))

    def compute_loss(x: Tensor, y: Tensor) -> Tensor:
        nonlocal weight
        weight *= 1.5
        logits = model(x)
        return criterion(logits, y) + weight * logits.square().mean()

    losses = []
    for x, y in loader:
        losses.append(run.forward_backward(compute_loss, x, y).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, (criterion.calls, criterion.samples)


@pytest.mark.parametrize(
    ("strategy", "ranks", "accumulate"),
    [("single", 1, 3), ("ddp", 2, 2), ("pipeline=2", 2, 1)],
)
def test_counters_and_annealed_numbers_are_those_of_one_call_for_each_step(
    strategy: str, ranks: int, accumulate: int
) -> None:
    expected, _ = trained("single", 1)
    for losses, (calls, samples) in world.run(ranks, trained, strategy, accumulate):
        assert losses == pytest.approx(expected, rel=1e-10)
        if strategy != "pipeline=2":  # there the criterion runs on the last rank
            assert (calls, samples) == (4, 28 if ranks == 1 else pytest.approx(14, abs=2))


def remembered(as_tuple: bool) -> str:
    run = shoal.init("single", precision="fp64", accumulate=2, announce=lambda _: None)
    model = Remembering(as_tuple).double()
    run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    try:
        x, y = run.share((torch.randn(4, 6).double(), torch.randint(3, (4,))))
        run.forward_backward(lambda x, y: F.cross_entropy(model(x), y), x, y)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("as_tuple", [False, True])
def test_states_of_samples_are_refused_where_the_next_call_has_others(as_tuple: bool) -> None:
    assert "keeps Remembering.hidden from one call to the next" in remembered(as_tuple)
