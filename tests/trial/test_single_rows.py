"""Losses that are tried where each rank has a single sample, so nothing of its own to compare."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import shoal
from shoal.errors import UsageError
from shoal.testing import world


def trained(strategy: str, is_mean: bool) -> tuple[str, torch.Tensor]:
    """Return the error, or the weights after one epoch of batches with a sample for each of two."""
    run = shoal.init(strategy, precision="fp64", announce=lambda _: None)
    torch.manual_seed(0)
    data = torch.randn(8, 4).double()
    model = nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, 2))
    for x in loader:
        optimizer.zero_grad()
        try:
            run.forward_backward(lambda x: model(x).mean() if is_mean else model(x).sum(), x)
        except UsageError as error:
            return str(error), torch.empty(0)
        optimizer.step()
    return "", run.weights()["weight"]


@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 2), ("zero3", 2)])
def test_a_sum_over_single_samples_is_refused(strategy: str, ranks: int) -> None:
    for error, _ in world.run(ranks, trained, strategy, False):
        assert error.startswith("compute_loss is a sum over samples"), error


@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 2), ("zero3", 2)])
def test_a_mean_over_single_samples_is_exact(strategy: str, ranks: int) -> None:
    _, expected = trained("single", True)
    for error, found in world.run(ranks, trained, strategy, True):
        assert error == ""
        assert (found - expected).abs().max() <= 1e-10 * expected.abs().max()
