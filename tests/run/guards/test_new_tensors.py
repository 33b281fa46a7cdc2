"""Scripts ask a weight for its device and for new tensors like it, whatever became of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.testing import world


class Recurrent(nn.Module):
    """A model that makes its hidden state from one of its weights, as many scripts do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.head = nn.Linear(6, 4)

    def new_state(self, rows: int) -> Tensor:
        state: Tensor = next(self.parameters()).new_full((rows, 6), 0.5)
        return state

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        scores: Tensor = self.head(self.second(self.first(x + state)))
        return scores


def train(strategy: str) -> tuple[list[float], list[str]]:
    torch.manual_seed(0)
    run = shoal.init(strategy, precision="fp64", announce=lambda _: None)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(12, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 4, (12,), generator=generator)
    net = Recurrent().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    net, optimizer, batches = run.prepare(net, optimizer, loader)

    def compute_loss(x: Tensor, y: Tensor, state: Tensor) -> Tensor:
        return F.cross_entropy(net(x, state), y)

    losses, devices = [], []
    for rows, classes in batches:
        device = next(net.parameters()).device
        devices.append(device.type)
        state = net.new_state(len(rows))
        loss = run.forward_backward(compute_loss, rows.to(device), classes.to(device), state)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        losses.append(net(x, net.new_state(12)).sum().item())
    return losses, devices


def all_trained(strategies: list[str]) -> list[Any]:
    return [train(strategy) for strategy in strategies]


def test_a_weight_that_is_divided_or_absent_gives_plain_tensors_and_this_ranks_device() -> None:
    losses, _ = train("single")
    for found in world.run(2, all_trained, ["zero3", "pipeline=2", "tensor=2", "zero1"]):
        for their_losses, devices in found:
            assert their_losses == pytest.approx(losses, rel=1e-10)
            assert set(devices) == {"cpu"}


def state_of_a_weight(strategy: str) -> str:
    run = shoal.init(strategy, precision="fp64", announce=lambda _: None)
    net = nn.Sequential(nn.Linear(6, 4)).double()
    net, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    weight = net[0].weight
    return type(weight.new_zeros(weight.shape)).__name__


def test_a_new_tensor_of_the_weights_own_shape_is_divided_as_the_weight_is() -> None:
    assert world.run(2, state_of_a_weight, "zero3") == ["DTensor", "DTensor"]
