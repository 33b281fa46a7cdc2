"""Layers that Python or NumPy leave out at random: as on one device; refused in pipelines."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import LaunchError, StrategyRefused
from shoal.testing import world

GENERATOR = torch.Generator().manual_seed(0)
ROWS = torch.randn(24, 8, generator=GENERATOR, dtype=torch.float64)
CLASSES = torch.randint(0, 5, (24,), generator=GENERATOR)


class Block(nn.Module):
    """A block that leaves itself out, by a number of its own choice of generator."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.draw is not None and self.draw() < 0.4:
            return x
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    """Blocks that are left out, by themselves or by the loop around them."""

    def __init__(self, in_blocks: Any, around: Any) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Block(in_blocks) for _ in range(5)])
        self.head = nn.Linear(8, 5)
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            if not (self.training and self.around is not None and self.around() < 0.4):
                x = block(x)
        out: Tensor = self.head(x)
        return out


def numpy_number() -> float:
    return float(np.random.rand())


NETS = {
    "in blocks": (random.random, None),
    "around": (None, numpy_number),
    "both": (numpy_number, random.random),
    "nowhere": (None, None),
}


def trained(strategy: str, name: str, accumulate: int = 1) -> dict[str, Any]:
    """Return weights, losses and the next numbers after two epochs and an evaluation."""
    torch.manual_seed(0)
    lines: list[str] = []
    run = shoal.init(strategy, accumulate=accumulate, precision="fp64", announce=lines.append)
    net = Net(*NETS[name]).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(ROWS, CLASSES), batch_size=8)
    net, optimizer, batches = run.prepare(net, optimizer, loader)
    random.seed(5)
    np.random.seed(6)

    def compute_loss(x: Tensor, y: Tensor) -> Tensor:
        scale = 1 + float(np.random.beta(0.4, 0.4))
        loss = F.cross_entropy(net(x * scale), y)
        if loss.item() > 0:  # only the last stage comes here
            loss = loss * (1 + random.gauss(0, 0.1))
        return loss

    found: dict[str, Any] = {"losses": []}
    for _ in range(2):
        for x, y in batches:
            optimizer.zero_grad()
            found["losses"].append(run.forward_backward(compute_loss, x, y).item())
            optimizer.step()
        net.eval()
        found["evaluated"] = run.evaluate(lambda x, y: {"sum": net(x).sum()}, loader)["sum"]
        net.train()
    found |= run.weights()
    found["next"] = [random.gauss(0, 1), random.random(), numpy_number()]
    found["noted"] = any("count for the whole batch" in line for line in lines)
    return found


def trained_all(
    strategy: str, accumulate: int = 1, names: Sequence[str] = (*NETS,)
) -> dict[str, dict[str, Any]]:
    return {name: trained(strategy, name, accumulate) for name in names}


@pytest.fixture(scope="module")
def one_device() -> dict[str, dict[str, Any]]:
    return trained_all("single")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "accumulate", "names"),
    [("zero3", 2, ("in blocks", "nowhere")), ("ddp", 1, (*NETS,))],
)
def test_layers_are_left_out_as_on_one_device(
    one_device: dict[str, dict[str, Any]], strategy: str, accumulate: int, names: Sequence[str]
) -> None:
    by_rank = world.run(2, trained_all, strategy, accumulate, names)
    for rank, of_rank in enumerate(by_rank):
        for name, found in of_rank.items():
            assert found.pop("noted") == (rank == 0), name
            for key, value in found.items():
                expected = one_device[name][key]
                torch.testing.assert_close(
                    value, expected, rtol=1e-10, atol=1e-10, msg=f"{name} {key}"
                )


@pytest.mark.slow
def test_whole_blocks_that_are_left_out_are_refused_under_zero() -> None:
    with pytest.raises(LaunchError, match="comes where other blocks of the model come"):
        world.run(2, trained, "zero3", "around")


def refused_by_a_pipeline(name: str, draws_in_loss: bool, evaluates: bool) -> str:
    run = shoal.init("pipeline=2", precision="fp64", announce=lambda _: None)
    net = Net(*NETS[name]).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(ROWS, CLASSES), batch_size=8)
    net, optimizer, batches = run.prepare(net, optimizer, loader)

    def compute_loss(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(net(x), y)
        return loss * (1 + random.gauss(0, 0.1)) if draws_in_loss else loss

    def scores(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"sum": net(x).sum() * float(np.random.beta(0.4, 0.4))}

    for x, y in batches:
        try:
            run.forward_backward(compute_loss, x, y)
            if evaluates:
                run.evaluate(scores, loader)
        except StrategyRefused as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "draws_in_loss", "evaluates"),
    [
        ("in blocks", False, False),
        ("nowhere", False, True),
        pytest.param("around", False, False, marks=pytest.mark.slow),
        pytest.param("nowhere", True, False, marks=pytest.mark.slow),
    ],
)
def test_a_pipeline_refuses_numbers_of_python_and_numpy(
    name: str, draws_in_loss: bool, evaluates: bool
) -> None:
    for text in world.run(2, refused_by_a_pipeline, name, draws_in_loss, evaluates):
        assert "Draw with torch, or in the loop" in text


@pytest.mark.slow
def test_a_pipeline_takes_a_step_that_draws_nothing() -> None:
    assert world.run(2, refused_by_a_pipeline, "nowhere", False, False) == ["", ""]
