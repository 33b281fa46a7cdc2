"""Trials on several ranks, under each strategy: no collective, and the same end on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_elementwise import TrustRatio
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import LaunchError, UsageError
from shoal.testing import world


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


def prepare_with_trust_ratio() -> None:
    run = shoal.init("zero3", precision="fp64", announce=lambda _: None)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)).double()
    run.prepare(model, TrustRatio(model.parameters(), 0.1, 2.0))


def test_an_optimizer_of_a_script_that_looks_at_whole_tensors_is_refused_on_shards() -> None:
    text = r"TrustRatio cannot step the shards of .*so it looks at whole tensors\. Use ddp"
    with pytest.raises(LaunchError, match=text):
        world.run(2, prepare_with_trust_ratio)
