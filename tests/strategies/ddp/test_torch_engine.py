"""DistributedDataParallel inside a run: unused parameters, and release at the end."""

import gc
import weakref

import pytest
import torch.nn.functional as F
from minimal_script import parts
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import shoal
from shoal.comm import mesh
from shoal.errors import LaunchError
from shoal.run.supervised import supervised
from shoal.testing import world

BUCKETS = "ddp,bucket_mb=0.0001"  # smaller than a small model, which goes in one message otherwise


class Fickle(nn.Module):
    """A model that uses one layer in the first step and the other afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(4, 3), nn.Linear(4, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        both: Tensor = self.first(x) + (self.second(x) if self.calls == 1 else 0)
        return both


def train_fickle(strategy: str) -> None:
    run = shoal.init(strategy, announce=lambda _: None)
    model, optimizer, loader = run.prepare(*parts(Fickle().double()))
    for x, y in loader:
        run.forward_backward(supervised(F.cross_entropy, model), x, y)
        optimizer.step()


def test_a_parameter_that_stops_being_used_is_named_in_that_very_step() -> None:
    with pytest.raises(
        LaunchError, match=r"second\.weight, second\.bias: no gradient in this step.*unused=true"
    ):
        world.run(2, train_fickle, BUCKETS)


@pytest.mark.parametrize("strategy", [f"{BUCKETS},unused=true", "ddp"])
def test_a_parameter_may_stop_being_used_with_unused_or_in_one_message(
    strategy: str,
) -> None:
    world.run(2, train_fickle, strategy)


def engine_after_leaving() -> bool:
    run = shoal.init(BUCKETS, announce=lambda _: None)
    model, _, loader = run.prepare(*parts())
    for x, y in loader:
        run.forward_backward(supervised(F.cross_entropy, model), x, y)
    engine = weakref.ref(
        next(object for object in gc.get_objects() if type(object) is DistributedDataParallel)
    )
    mesh.shutdown()
    return engine() is None


def test_nothing_of_ours_holds_a_process_group_that_was_left() -> None:
    assert world.run(2, engine_after_leaving) == [True, True]
