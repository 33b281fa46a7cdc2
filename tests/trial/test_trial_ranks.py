"""Trials on several ranks, under each strategy: no collective, and the same end on all ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from test_elementwise import TrustRatio
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import LaunchError, UsageError
from shoal.testing import world
from shoal.trial import LossTrial


class Batch(NamedTuple):
    """The fields of a LocalBatch that a trial reads."""

    compute_loss: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    num_samples: int


def steps(strategy: str, padded: bool, with_trials: bool = True) -> tuple[list[str], list[float]]:
    """Three steps. Returns the kinds of the verdicts, and the losses; an error ends them."""
    run = shoal.init(strategy, precision="fp64", announce=lambda _: None)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 4)).double()
    targets = torch.randint(0, 4, (24,))
    if padded:
        targets[-5:] = -100  # on the last rank alone
    data = TensorDataset(torch.randn(24, 6).double(), targets)
    model, optimizer, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(data, batch_size=24)
    )
    # tensor and pipeline are applied in the first step, after the trial of the whole model.
    whole = "zero" not in strategy
    trial = LossTrial([model], run.world, lambda _: None, whole_models=whole)

    def compute_loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    kinds, losses = [], []
    for _ in range(3):
        for x, y in loader:
            batch = Batch(compute_loss, (x, y), {}, len(x))
            batch = trial.before_step(batch) if with_trials else batch
            loss = run.forward_backward(batch.compute_loss, x, y)
            kinds.append(trial.verdict.kind.value if trial.verdict else "none")
            try:
                trial.after_step(int(run.mesh.all_reduce(torch.tensor([trial.objection]))))
            except UsageError as error:
                return [*kinds, str(error)], losses
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    return kinds, losses


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
    for found in ranks:
        for strategy in strategies:
            (kinds, losses), (_, plain), (refused, _) = found[strategy]
            assert kinds[0] == "mean", strategy
            assert set(kinds) <= {"mean", "none"}, strategy
            assert losses == plain, strategy
            assert "compute_loss is no mean over samples" in refused[-1]


def test_ranks_try_their_rows_alone_and_refuse_together() -> None:
    strategies = ("ddp", "zero1", "zero3")
    ranks = world.run(2, all_of, strategies)
    check(ranks, strategies)
    first, last = (found["zero3"][2][0][-1] for found in ranks)
    assert "another rank has found" in first
    assert "targets of -100 look like ignored ones" in last


def test_layers_in_slices_and_stages_are_tried_before_they_are_divided() -> None:
    strategies = ("tensor=2", "pipeline=2")
    check(world.run(2, all_of, strategies), strategies)


def prepare_with_trust_ratio() -> None:
    run = shoal.init("zero3", precision="fp64", announce=lambda _: None)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)).double()
    run.prepare(model, TrustRatio(model.parameters(), 0.1, 2.0))


def test_an_optimizer_of_a_script_that_looks_at_whole_tensors_is_refused_on_shards() -> None:
    text = r"TrustRatio cannot step the shards of .*so it looks at whole tensors\. Use ddp"
    with pytest.raises(LaunchError, match=text):
        world.run(2, prepare_with_trust_ratio)
