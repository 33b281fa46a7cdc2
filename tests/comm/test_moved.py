"""Buckets of DistributedDataParallel that are moved to where other ranks read them."""

import gc
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shoal.comm.backend import moved
from shoal.comm.backend.group import ShoalGroup
from shoal.comm.backend.room import NOWHERE
from shoal.proof import Experiment
from shoal.proof.zoo import image_loader
from shoal.testing import world
from shoal.testing.check_strategy import check_strategy


def group() -> Any:
    assert isinstance(dist.group.WORLD, ShoalGroup)
    return dist.group.WORLD


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_script_of_ones_own_profits_and_its_gradients_are_the_same_to_the_last_bit(ranks: int) -> None:
    for read, copied, held, later in world.run(ranks, _train):
        assert read < copied
        assert held == [2, 2]
        assert later == 0
    assert not [name for name in os.listdir("/dev/shm") if "torch" in name]


def _train() -> tuple[int, int, list[int], int]:
    rooms, found, held = group()._exchange.rooms, {}, []
    for view in (False, True):
        for forbidden in ("1", "0"):
            os.environ["DDP_DISABLE_COMM_MEM"] = forbidden
            found[view, forbidden] = _steps(view)
            if forbidden == "0":
                held.append(len(rooms.own.moved._held))
            gc.collect()
    for view in (False, True):
        assert all(torch.equal(*pair) for pair in zip(found[view, "0"][1], found[view, "1"][1], strict=True))
    assert rooms.own.place(torch.ones(1)) == NOWHERE
    dist.barrier()
    for rank, number in list(rooms._moved._maps):
        rooms._moved.open(rank, number)
    return found[True, "0"][0], found[True, "1"][0], held, len(rooms.own.moved._held) + len(rooms._moved._maps)


def _steps(view: bool) -> tuple[int, list[Tensor]]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(700, 900), nn.Tanh(), nn.Linear(900, 900), nn.Tanh(), nn.Linear(900, 10))
    model = DistributedDataParallel(module, gradient_as_bucket_view=view, bucket_cap_mb=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        made = torch.Generator().manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        phase = group()._exchange.phase
        model(torch.randn(4, 700, generator=made)).square().mean().backward()
        optimizer.step()
    return group()._exchange.phase - phase, [p.grad.clone() for p in module.parameters() if p.grad is not None]


def test_a_bucket_that_one_rank_cannot_open_is_copied_by_all() -> None:
    assert world.run(2, _train_without_opening) == [True, True]


def _train_without_opening() -> bool:
    if dist.get_rank() == 1:
        moved._open = lambda *_: None  # type: ignore[assignment]
    _, ours = _steps(view=True)
    os.environ["DDP_DISABLE_COMM_MEM"] = "1"
    _, theirs = _steps(view=True)
    return all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


def test_a_tensor_that_a_line_of_python_reduces_stays_where_it_is() -> None:
    assert world.run(2, _reduce_in_a_hook) == [True, True]


def _reduce_in_a_hook() -> bool:
    weight = torch.ones(1000, 1000, requires_grad=True)
    places = []

    def reduce(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        before = gradient.data_ptr()
        dist.all_reduce(gradient)
        places.append(before == gradient.data_ptr())
        return gradient

    weight.register_hook(reduce)
    weight.sum().backward()
    return places == [True] and not group()._exchange.rooms.own.moved._held


class Wide(nn.Module):
    """With buckets so large that they are moved."""

    def __init__(self) -> None:
        super().__init__()
        middle = (nn.Linear(64, 700), nn.Tanh(), nn.Linear(700, 500))
        self.layers = nn.Sequential(nn.Flatten(), *middle, nn.Linear(500, 10))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layers(x)
        return scores


def test_data_parallel_training_with_moved_buckets_is_training() -> None:
    check_strategy("ddp", 2, Experiment(Wide, image_loader, nn.functional.cross_entropy, steps=4))
