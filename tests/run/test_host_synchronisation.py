"""A step reads no number of a tensor in Python, so that on a GPU no step waits for the device.

On the device `meta` tensors have no numbers, and every read is an error. On several ranks, where
messages need numbers, all reads are counted, while the group is taken for one of GPUs.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from host_reads import HostReads
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.comm import mesh
from shoal.comm.axis import Axis
from shoal.run.supervised import supervised
from shoal.strategies.single import single_device
from shoal.strategies.transforms.precision import LossScale, unscale
from shoal.testing import world

OVER_THE_CPU = {
    "axis.py:sum_of_host_numbers",
    "lockstep.py:is_same_on_all_ranks",
    "lockstep.py:unused",
    "executor.py:_common_seed",
    "units.py:draw_seed",
    "step.py:forward_backward",
}
"""Reads of numbers that hosts have drawn or sent to each other over the CPU, or that are made only
of tensors of the CPU: none waits for a GPU.
"""


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)
    )


def counted(output: torch.Tensor, y: torch.Tensor) -> shoal.Counted:
    return shoal.counted(F.cross_entropy(output, y, reduction="sum"), torch.ones_like(y).sum())


LOSSES: dict[str, Callable] = {"mean": F.cross_entropy, "counted": counted}


@pytest.mark.parametrize("strategy", ["single", "ddp", "recompute,single", "dataparallel"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_needs_no_number_of_its_tensors(
    monkeypatch: pytest.MonkeyPatch, strategy: str, accumulate: int, loss: str
) -> None:
    monkeypatch.setattr(mesh, "_device", lambda place: torch.device("meta"))
    run = shoal.init(
        strategy, accumulate=accumulate, guards=False, nonfinite="ignore", announce=lambda _: None
    )
    model = net().to("meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = TensorDataset(torch.randn(12, 4), torch.zeros(12, dtype=torch.int64))
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, 6))
    for x, y in loader:
        optimizer.zero_grad()
        found = run.forward_backward(supervised(LOSSES[loss], model), x, y)
        norm = run.clip_gradients(1.0)
        optimizer.step()
        assert (found.device.type, norm.device.type) == ("meta", "meta")
    with pytest.raises(RuntimeError, match="meta"):
        found.item()


STRATEGIES = [
    "ddp,bucket_mb=0.0001",
    "ddp,unused=true,bucket_mb=0.0001",
    "zero1",
    "zero2",
    "zero3",
    "tensor=2",
    "pipeline=2,cuts=3",
]


def reads_of(strategies: list[str]) -> dict[str, dict[str, int]]:
    """Return for each strategy the reads of its fourth to sixth step."""
    # Not the device of the tensors, as on a mesh of GPUs.
    setattr(Axis, "host_device", property(lambda self: torch.device("cpu", 0)))  # noqa: B010
    found = {}
    for strategy in strategies:
        run, model = (
            shoal.init(strategy, guards=False, nonfinite="ignore", announce=lambda _: None),
            net(),
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        data = TensorDataset(torch.randn(96, 4), torch.zeros(96, dtype=torch.int64))
        model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, 16))
        reads = HostReads()
        for number, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            if number < 3:
                run.forward_backward(supervised(F.cross_entropy, model), x, y)
                optimizer.step()
            else:
                with reads:
                    run.forward_backward(supervised(F.cross_entropy, model), x, y)
                    run.clip_gradients(1.0)
                    optimizer.step()
        found[strategy] = dict(reads.places)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "strategies"), [(2, STRATEGIES), (4, ["pipeline=2,cuts=3,microbatches=2,zero1"])]
)
def test_a_step_on_several_ranks_reads_only_what_came_over_the_cpu(
    ranks: int, strategies: list[str]
) -> None:
    for found in world.run(ranks, reads_of, strategies):
        others = {strategy: set(places) - OVER_THE_CPU for strategy, places in found.items()}
        assert {strategy: places for strategy, places in others.items() if places} == {}


def test_a_read_of_a_number_is_counted() -> None:
    """Without it, the tests above would find nothing if torch called other functions."""
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    with HostReads() as reads:
        unscale(single_device(model), LossScale(1.0))
    assert reads.places == {"precision.py:unscale": 1}
