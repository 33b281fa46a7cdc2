"""A shard answers what it is told, and refuses what contradicts its layout.

Schedules of any order, with repeated and lost messages, are tried by
../worker/test_session_schedules.py, and what shards note of them by ../test_recorded_order.py.
"""

import pytest
import torch
from torch import Tensor, nn

from shoal.parameter_server.events import (
    GradNormResponse,
    GradResponse,
    ProtocolViolation,
    PullResponse,
    StepRequest,
)
from shoal.parameter_server.node.shard import Shard
from shoal.parameter_server.optimizer_spec import OptimizerSpec, Settings, recipe_of, settings_of
from shoal.parameter_server.partitioning import ParamMeta, Partition, partition

SHAPES = {
    "a": ParamMeta(5, torch.float64, 0),
    "b": ParamMeta(3, torch.float64, 0),
    "c": ParamMeta(4, torch.float64, 1),
}
PARTS = partition(SHAPES, part_bytes=64)


def optimizer() -> torch.optim.Optimizer:
    groups = [
        [
            nn.Parameter(torch.ones(5, dtype=torch.float64)),
            nn.Parameter(torch.ones(3, dtype=torch.float64)),
        ]
    ]
    groups.append([nn.Parameter(torch.ones(4, dtype=torch.float64))])
    return torch.optim.SGD([{"params": g} for g in groups], lr=0.1, momentum=0.9, weight_decay=0.01)


def recipe() -> OptimizerSpec:
    return recipe_of(optimizer())


def shard(workers: int, staleness: int | None = 0) -> Shard:
    made = Shard(PARTS, recipe(), range(workers), staleness)
    for part in PARTS:
        made.load(
            0, part.number, torch.ones(part.length, dtype=part.dtype), [{}] * len(part.segments), 0
        )
    return made


def gradient(worker: int, step: int, part: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * worker + 10 * step + part)
    return torch.randn(PARTS[part].length, dtype=torch.float64, generator=generator)


def step_request() -> StepRequest:
    return StepRequest([settings_of(group) for group in optimizer().param_groups])


def test_a_parameter_without_a_gradient_is_left_unchanged() -> None:
    to = shard(2)
    first, second = gradient(0, 0, 0), gradient(1, 0, 0)
    first[5:], second[5:] = 0, 0
    to.push(0, 0, 0, first.clone(), b"\1\0")
    to.push(1, 0, 0, second.clone(), b"\1\0")
    assert list(to.request_step(0, 0, step_request())) == []
    assert len(list(to.request_step(1, 0, step_request()))) == 2
    values = to.held[0].values
    assert torch.equal(values[5:], torch.ones(3, dtype=torch.float64))
    assert not torch.equal(values[:5], torch.ones(5, dtype=torch.float64))
    assert to.held[0].state()[1] == {}


@pytest.mark.parametrize("staleness", [0, 1, None])
def test_values_can_be_sent_before_the_next_partition_is_stepped(
    staleness: int | None,
) -> None:
    to = shard(1, staleness)
    for part in PARTS:
        to.push(0, 0, part.number, gradient(0, 0, part.number), b"\1" * len(part.segments))
    for number, value in enumerate(to.request_step(0, 0, step_request())):
        assert isinstance(value, PullResponse)
        assert value.part == number
        assert [held.clock for held in to.held.values()] == [1] * (number + 1) + [0] * (
            len(PARTS) - number - 1
        )


def test_queries_are_answered_when_every_worker_has_pushed() -> None:
    to, ones = shard(2), b"\1\1"
    assert to.query_gradient(1, 0, 0, as_tensor=True) == []
    assert to.query_gradient(0, 0, 1, as_tensor=False) == []
    to.push(0, 0, 0, gradient(0, 0, 0), ones)
    (answer,) = to.push(1, 0, 0, gradient(1, 0, 0), ones)
    total = gradient(0, 0, 0) + gradient(1, 0, 0)
    assert isinstance(answer, GradResponse)
    assert torch.equal(answer.values, total)
    to.push(0, 0, 1, gradient(0, 0, 1), b"\1")
    (norm,) = to.push(1, 0, 1, gradient(1, 0, 1), b"\1")
    other = gradient(0, 0, 1) + gradient(1, 0, 1)
    assert isinstance(norm, GradNormResponse)
    assert norm.squared == pytest.approx(float(other.square().sum()))


@pytest.mark.parametrize(
    ("worker", "step", "part", "length", "present"),
    [
        (5, 0, 0, 8, b"\1\1"),
        (0, 3, 0, 8, b"\1\1"),
        (0, 0, 9, 8, b"\1\1"),
        (0, 0, 0, 7, b"\1\1"),
        (0, 0, 0, 8, b"\1"),
    ],
)
def test_a_push_that_contradicts_the_layout_is_refused(
    worker: int, step: int, part: int, length: int, present: bytes
) -> None:
    with pytest.raises(ProtocolViolation):
        shard(2).push(worker, step, part, torch.zeros(length, dtype=torch.float64), present)


def test_a_step_request_sets_the_learning_rate_and_scales_the_gradient() -> None:
    to = Shard([Partition(0, 0, torch.float64, PARTS[1].segments)], _plain(), [0])
    to.load(0, 0, torch.zeros(4, dtype=torch.float64), [{}], 0)
    to.push(0, 0, 0, torch.ones(4, dtype=torch.float64), b"\1")
    settings: Settings = {"lr": 0.5}
    assert len(list(to.request_step(0, 0, StepRequest([settings], scale=3.0)))) == 1
    assert torch.equal(to.held[0].values, torch.full((4,), -1.5, dtype=torch.float64))


def _plain() -> OptimizerSpec:
    return recipe_of(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))


def test_an_asynchronous_part_counts_its_updates_on_where_weights_are_loaded_again() -> None:
    made = shard(1, staleness=None)
    made.push(0, 0, 0, gradient(0, 0, 0), bytes([1] * len(PARTS[0].segments)))
    list(made.request_step(0, 0, step_request()))
    state = made.held[0]
    made.load(0, 0, state.values.clone(), state.state(), 0)
    assert state.clock == 1
