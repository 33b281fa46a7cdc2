"""A BatchNorm that is given one sample, where one device's batch has more."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import LaunchError, PeerLost, UsageError
from shoal.testing import world


def single_samples(strategies: list[str]) -> list[str]:
    found = []
    for strategy in strategies:
        run = shoal.init(strategy, announce=lambda _: None)
        net = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(4)])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.randn(2, 6)), batch_size=2)
        net, optimizer, batches = run.prepare(net, optimizer, loader)
        (batch,) = batches
        with pytest.raises(UsageError) as caught:
            run.forward_backward(lambda x, net=net: net(x).square().mean(), *batch)
        found.append(str(caught.value))
    return found


def test_a_batchnorm_with_one_sample_on_a_rank_is_refused_with_cures() -> None:
    for found in world.run(2, single_samples, ["ddp", "zero3"]):
        for text in found:
            assert text.startswith("a BatchNorm was given one sample")
            assert "sync_batchnorm=True" in text


def loop_over_an_uneven_epoch() -> None:
    run = shoal.init(announce=lambda _: None)
    net = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(6, 6)), batch_size=4)
    net, optimizer, batches = run.prepare(net, optimizer, loader)
    for (x,) in batches:
        run.backward(net(x).square().mean())
        optimizer.step()


def test_so_is_one_in_the_last_batch_of_a_loop_that_computes_its_loss() -> None:
    with pytest.raises(LaunchError, match="a BatchNorm was given one sample"):
        world.run(2, loop_over_an_uneven_epoch)


def one_stage_tells(strategy: str) -> str:
    try:
        return single_samples([strategy])[0]
    except PeerLost as error:
        return str(error)


def test_so_is_one_in_the_micro_batches_of_a_pipeline() -> None:
    assert "a BatchNorm was given one sample" in str(
        world.run(2, one_stage_tells, "pipeline=2,microbatches=2")
    )


def one_row_of_own_length() -> list[float]:
    """Take two steps on one row a rank, which each rank has padded to a length of its own."""
    run = shoal.init(announce=lambda _: None)
    torch.manual_seed(0)
    net = nn.Linear(1, 1).double()
    net, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    x = torch.ones(1, 3 + run.rank, 1).double()
    losses = []
    for _ in range(2):
        losses.append(run.forward_backward(lambda x: net(x).square().mean(), x, rows=1).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_single_rows_of_other_lengths_on_each_rank_are_trained_without_a_trial() -> None:
    first, second = world.run(2, one_row_of_own_length)
    assert first == second
    assert first[1] < first[0]
