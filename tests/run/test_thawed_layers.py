"""Phases of training: layers are thawed by a second `prepare`, or rest at a learning rate of 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import StrategyRefused, UsageError
from shoal.testing import world
from tests.harness.in_turn import in_turn

QUIET: dict[str, Any] = {"announce": lambda _: None, "precision": "fp64"}


def loader() -> DataLoader:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(10, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 4, (10,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=5)


class Net(nn.Module):
    """Blocks, which are units of zero, a tied weight, a scalar and statistics of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.blocks[2].weight = self.blocks[1].weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("calls", torch.zeros(()))
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for block in self.blocks:
            x = x + torch.tanh(block(x)) * self.scale
        scores: Tensor = self.head(x)
        return scores


def one_model_in_phases(strategy: str) -> tuple[list[float], dict[str, Tensor]]:
    """Train a head, all layers, the head and all layers, with one optimizer for each phase.

    In a fifth phase the last optimizer goes on with a further group, and keeps its momentum.
    """
    torch.manual_seed(0)
    run = shoal.init(strategy, **QUIET)
    net = Net().double()
    optimizer, batches = None, loader()
    losses = []
    extra = nn.Sequential(nn.Linear(6, 4), nn.Tanh()).double()

    def compute_loss(x: Tensor, y: Tensor) -> Tensor:
        scores = net(x) if phase < 4 else net(x) + extra(x)
        return F.cross_entropy(scores, y)

    for phase in range(5):
        if phase < 4:
            net.blocks.requires_grad_(phase % 2 == 1)
            net.scale.requires_grad_(phase % 2 == 1)
            trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
            optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        if phase == 0:
            net, optimizer, batches = run.prepare(net, optimizer, batches)
        elif phase < 4:
            optimizer = run.prepare(optimizer)
        else:
            optimizer.add_param_group({"params": list(extra.parameters()), "lr": 0.05})
            extra, optimizer = run.prepare(extra, optimizer)
        for x, y in batches:
            loss = run.forward_backward(compute_loss, x, y)
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    weights = {name: value.clone() for name, value in run.weights().items() if "calls" not in name}
    return losses, weights


def test_local_steps_train_other_layers_from_phase_to_phase() -> None:
    losses, weights = one_model_in_phases("single")
    calls = ("ddp",), ("local=1",), ("recompute,ddp",)
    for found in world.run(2, in_turn, one_model_in_phases, *calls):
        for their_losses, their_weights in found:
            assert their_losses[-1] == pytest.approx(losses[-1], rel=1e-10)
            torch.testing.assert_close(their_weights, weights, rtol=1e-9, atol=1e-12)


def at_rest(strategy: str) -> tuple[str, list[float], dict[str, Tensor]]:
    """Train the last layer, all by learning rates alone, the last layer again by freezing the
    first, and all; then ask for other parameters.
    """
    torch.manual_seed(0)
    run = shoal.init(strategy, **QUIET)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    groups = [{"params": net[0].parameters(), "lr": 0.0}, {"params": net[2].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    net, optimizer, batches = run.prepare(net, optimizer, loader())
    losses: list[float] = []
    for phase in range(4):
        if phase == 1:
            optimizer.param_groups[0]["lr"] = 0.05
        net[0].requires_grad_(phase != 2)
        for x, y in batches:
            loss = run.forward_backward(lambda x, y: F.cross_entropy(net(x), y), x, y)
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    weights = {name: value.clone() for name, value in run.weights().items()}
    refusal = ""
    if strategy != "single":
        net[0].requires_grad_(False)
        with pytest.raises(StrategyRefused) as caught:
            run.prepare(torch.optim.SGD(net[2].parameters(), lr=0.1))
        refusal = str(caught.value)
    return refusal, losses, weights


def check_sentence_of_a_thawed_layer(strategy: str) -> None:
    """A cure that this strategy would refuse is not given."""
    run = shoal.init(strategy, **QUIET)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    net[0].requires_grad_(False)
    net, _, batches = run.prepare(net, torch.optim.SGD(net[2].parameters(), lr=0.1), loader())
    net[0].requires_grad_(True)
    x, y = next(iter(batches))
    cure = r"Unfreeze it, with a learning rate of 0 as long as it is to rest, before run.prepare"
    with pytest.raises(UsageError, match=cure):
        run.forward_backward(lambda x, y: F.cross_entropy(net(x), y), x, y)


def all_at_rest(strategies: list[str]) -> list[Any]:
    for strategy in strategies:
        check_sentence_of_a_thawed_layer(strategy)
    return [at_rest(strategy) for strategy in strategies]


def test_layers_rest_at_a_rate_of_zero_which_is_the_cure_where_they_cannot_be_thawed() -> None:
    _, losses, weights = at_rest("single")
    strategies = ["zero3", "tensor=2", "pipeline=2", "server=1"]
    for found in (all_at_rest(["dataparallel"]), *world.run(2, all_at_rest, strategies)):
        for refusal, their_losses, their_weights in found:
            assert "a learning rate of 0 for those that rest" in refusal
            assert their_losses == pytest.approx(losses, rel=1e-10)
            torch.testing.assert_close(their_weights, weights, rtol=1e-9, atol=1e-12)


def phase(run: shoal.Run, net: nn.Module, optimizer: Any, batches: DataLoader) -> list[float]:
    """Train for an epoch; return the losses."""
    losses = []
    for x, y in batches:
        loss = run.forward_backward(lambda x, y: F.cross_entropy(net(x), y), x, y)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def in_two_runs(strategy: str, path: str) -> list[float]:
    """Train the last layer, save, and train all layers in a run of its own."""
    torch.manual_seed(0)
    losses: list[float] = []
    for layers_at_rest in (1, 0):
        run = shoal.init(strategy, **QUIET)
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        if losses:
            net.load_state_dict(torch.load(path))
        net[:layers_at_rest].requires_grad_(False)
        trained = [p for p in net.parameters() if p.requires_grad]
        net, optimizer, batches = run.prepare(net, torch.optim.SGD(trained, lr=0.1), loader())
        losses += phase(run, net, optimizer, batches)
        run.save(path)
    return losses


def test_a_saved_phase_goes_on_with_thawed_layers_in_a_run_of_its_own(tmp_path: Path) -> None:
    losses = in_two_runs("single", str(tmp_path / "one.pt"))
    calls = [(strategy, str(tmp_path / "many.pt")) for strategy in ("zero3", "pipeline=2")]
    for found in world.run(2, in_turn, in_two_runs, *calls):
        assert found == [pytest.approx(losses, rel=1e-10)] * len(calls)
