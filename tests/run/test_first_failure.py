"""One rank alone finds an error in a step: all ranks end with it, and none waits for ever."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import PeerLost, ShoalError, UsageError
from shoal.run import collective_calls
from shoal.testing import world


def end_of_run(strategy: str, kind: str) -> tuple[str, str]:
    """Train until the second data rank fails. Returns the class of the error and its text."""
    run = shoal.init(strategy, precision="fp64", announce=lambda _: None)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    data = TensorDataset(torch.randn(16, 6).double(), torch.randint(0, 4, (16,)))
    model, optimizer, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(data, batch_size=8)
    )
    step = 0

    def compute_loss(x: Tensor, y: Tensor) -> Tensor:
        scores = model(x)
        is_second = step == 1 and run.mesh.data.rank == 1
        if kind == "their own" and is_second and not float(F.cross_entropy(scores, y)) < 0:
            raise KeyError("no such class")
        return F.cross_entropy(scores.detach() if is_second else scores, y)

    def refused_by_all(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        raise UsageError("refused on all ranks")

    with pytest.raises(UsageError, match="refused on all ranks"):  # and caught by the script
        run.evaluate(refused_by_all, DataLoader(data, batch_size=4))
    try:
        for x, y in loader:
            run.forward_backward(compute_loss, x, y)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    except (ShoalError, KeyError) as error:
        return type(error).__name__, str(error)
    return "", ""


def test_a_refusal_on_one_data_rank_of_a_pipeline_ends_all_ranks_with_its_reason() -> None:
    found = world.run(4, end_of_run, "pipeline=2,ddp", "a loss without gradients")
    for rank, (kind, text) in enumerate(found):
        assert kind == UsageError.__name__, rank
        assert "the loss has no gradient" in text, rank
        assert text.startswith("rank 3 says: ") == (rank != 3), text


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 2), ("pipeline=2,ddp", 4)])
def test_an_error_of_the_script_on_one_rank_is_named_by_the_others(
    strategy: str, ranks: int
) -> None:
    *others, last = world.run(ranks, end_of_run, strategy, "their own")
    assert last == ("KeyError", repr("no such class"))
    for kind, text in others:
        assert kind == PeerLost.__name__
        assert text.startswith(f"rank {ranks - 1} has ended with KeyError: 'no such class' (")


class Picky(nn.Linear):
    """A layer that refuses a batch, where it has values."""

    refuses = False

    def forward(self, x: Tensor) -> Tensor:
        if self.refuses and type(x) is Tensor and not x.is_meta:
            raise ValueError("a bad sample")
        return super().forward(x)


def end_of_careless_run(strategy: str, everywhere: bool) -> tuple[list[str], str]:
    """Train past an error in the step. Returns the errors that were caught, and the last one."""
    collective_calls.WAIT_S = 0.5
    run = shoal.init(strategy, announce=lambda _: None)
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), Picky(8, 4)]
    model = nn.Sequential(*layers).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = TensorDataset(torch.arange(96.0).view(16, 6).double() / 96, torch.arange(16) % 4)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, batch_size=4))
    caught, step = [], 0

    def compute_loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    try:
        for x, y in loader:
            layers[-1].refuses = step == 1 and (everywhere or run.rank == 1)
            try:
                run.forward_backward(compute_loss, x, y)
                optimizer.step()
            except ValueError as error:
                caught.append(str(error))
            step += 1
    except ShoalError as error:
        return caught, f"{type(error).__name__}: {error}"
    return caught, ""


def test_a_rank_that_goes_on_after_an_error_of_its_own_is_stopped() -> None:
    (caught, other), (own_caught, own) = world.run(2, end_of_careless_run, "pipeline=2", False)
    assert (caught, own_caught) == ([], ["a bad sample"])
    assert own.startswith("UsageError: rank 1 has gone on after an error")
    assert "1 of 2 ranks have failed in: ValueError: a bad sample" in own
    assert other.startswith("PeerLost: rank 1 has ended with ValueError: a bad sample")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero3", "tensor=2"])
def test_such_a_rank_is_stopped_under_other_strategies(strategy: str) -> None:
    (_, other), (_, own) = world.run(2, end_of_careless_run, strategy, False)
    assert own.startswith("UsageError: rank 1 has gone on after an error")
    assert other.startswith("PeerLost: rank 1 has ended with ValueError: a bad sample")


@pytest.mark.slow
def test_ranks_go_on_after_an_error_that_all_of_them_have() -> None:
    for found in world.run(2, end_of_careless_run, "ddp", True):
        assert found == (["a bad sample"], "")
