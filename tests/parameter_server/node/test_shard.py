"""The shard under thousands of schedules: messages in any order, repeated, or lost."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.parameter_server.events import (
    Acknowledged,
    GradNormResponse,
    GradResponse,
    InstallSnapshot,
    Outgoing,
    ProtocolViolation,
    PullResponse,
    ReplicateUpdate,
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


def reference_values(workers: int, steps: int) -> list[Tensor]:
    """Return the values after `steps` synchronous steps, by torch alone."""
    values = []
    for part in PARTS:
        parameter = nn.Parameter(torch.ones(part.length, dtype=part.dtype))
        stepped = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, weight_decay=0.01)
        for step in range(steps):
            total = gradient(0, step, part.number)
            for worker in range(1, workers):
                total = total + gradient(worker, step, part.number)
            parameter.grad = total
            stepped.step()
        values.append(parameter.detach())
    return values


@dataclass
class Worker:
    """Pushes its partitions in any order, requests the step, and waits for all values.

    It may resend everything.
    """

    number: int
    steps: int
    step: int = 0
    arrived: dict[int, int] = field(default_factory=lambda: {part.number: 0 for part in PARTS})
    pushed: set[int] = field(default_factory=set)
    ordered: bool = False

    def choices(self) -> list[tuple[str, int]]:
        """Return the possible next actions: new ones, and resends of what has no answer."""
        waiting = [p for p, clock in self.arrived.items() if clock < self.step]
        if waiting:
            return [("again", p) for p in waiting] + [("order again", 0)]
        if self.step == self.steps:
            return []
        rest = [("push", p) for p in self.arrived if p not in self.pushed]
        again = [("push", p) for p in self.pushed]
        return (rest or [("order", 0)]) + again

    def act(self, what: str, part: int, to: Shard) -> Iterable[Outgoing]:
        ones = b"\1" * len(PARTS[part].segments)
        match what:
            case "push":
                self.pushed.add(part)
                return to.push(
                    self.number, self.step, part, gradient(self.number, self.step, part), ones
                )
            case "order":
                self.step, self.pushed = self.step + 1, set()
                return to.request_step(self.number, self.step - 1, step_request())
            case "again":
                return to.push(
                    self.number,
                    self.step - 1,
                    part,
                    gradient(self.number, self.step - 1, part),
                    ones,
                )
        return to.request_step(self.number, self.step - 1, step_request())


def deliver(out: Iterable[Outgoing], workers: list[Worker]) -> Iterator[PullResponse]:
    for message in out:
        assert isinstance(message, PullResponse), message
        workers[message.worker].arrived[message.part] = message.clock
        yield message


@settings(max_examples=300)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 3))
def test_every_schedule_of_synchronous_steps_gives_the_same_bits(seed: int, count: int) -> None:
    chance = Random(seed)
    to, workers = shard(count), [Worker(number, steps=2) for number in range(count)]
    while any(worker.step < worker.steps or worker.choices() for worker in workers):
        worker = chance.choice([w for w in workers if w.choices()])
        what, part = chance.choice(worker.choices())
        for value in deliver(worker.act(what, part, to), workers):
            assert value.clock == value.min_clock
    for found, expected in zip(to.held.values(), reference_values(count, 2), strict=True):
        assert torch.equal(found.values, expected)


@settings(max_examples=300)
@given(seed=st.integers(0, 2**32), staleness=st.sampled_from([1, 2, None]))
def test_no_read_is_staler_than_allowed_and_each_push_is_applied_once(
    seed: int, staleness: int | None
) -> None:
    chance = Random(seed)
    to, workers = shard(3, staleness), [Worker(number, steps=4) for number in range(3)]
    to.record()
    while any(worker.step < worker.steps or worker.choices() for worker in workers):
        worker = chance.choice([w for w in workers if w.choices()])
        what, part = chance.choice(worker.choices())
        for value in deliver(worker.act(what, part, to), workers):
            assert value.min_clock == min(to.done[value.part].values())
            assert staleness is None or value.min_clock >= value.clock - staleness
    assert to.history is not None
    applied = [(e.part, e.worker, e.step) for e in to.history.chunk(0)[1] if e.kind == "a"]
    assert sorted(applied) == sorted(
        (p.number, w, s) for p in PARTS for w in range(3) for s in range(4)
    )


def _copied(applied: ReplicateUpdate) -> ReplicateUpdate:
    """Copy a message, as a connection does: with a gradient of its own."""
    gradient = applied.update.gradient.clone()
    return applied._replace(update=applied.update._replace(gradient=gradient))


class Replica:
    """A backup that gets all messages in order, as over a connection."""

    def __init__(self, primary: Shard, number: int) -> None:
        self.shard = Shard(PARTS, recipe(), primary.workers, primary.staleness)
        self.number = number
        self.inbox: list[InstallSnapshot | ReplicateUpdate] = []
        self.queue(primary.add_backup(number))

    def queue(self, out: list[Outgoing]) -> list[Outgoing]:
        """Queue the messages for this replica; return the others."""
        mine = [
            m
            for m in out
            if isinstance(m, (InstallSnapshot, ReplicateUpdate)) and m.backup == self.number
        ]
        self.inbox += [_copied(m) if isinstance(m, ReplicateUpdate) else m for m in mine]
        return [
            m
            for m in out
            if not (isinstance(m, (InstallSnapshot, ReplicateUpdate)) and m.backup == self.number)
        ]

    def handle_one(self, primary: Shard) -> list[Outgoing]:
        """Handle one message; return the primary's answers to its acknowledgement."""
        message = self.inbox.pop(0)
        answers = (
            self.shard.install_snapshot(message)
            if isinstance(message, InstallSnapshot)
            else self.shard.apply_replicated(message)
        )
        assert isinstance(answers[0], Acknowledged)
        return primary.on_ack(self.number, answers[0].part, answers[0].clock)


@settings(max_examples=300)
@given(seed=st.integers(0, 2**32), staleness=st.sampled_from([0, 1, None]))
def test_a_backup_may_take_over_at_any_moment_without_losing_an_answer(
    seed: int, staleness: int | None
) -> None:
    chance = Random(seed)
    to, workers = shard(2, staleness), [Worker(number, steps=3) for number in range(2)]
    replica: Replica | None = Replica(to, 7)
    dies_after = chance.randint(0, 40)
    moves = 0
    while any(worker.step < worker.steps or worker.choices() for worker in workers):
        moves += 1
        if (
            replica is not None
            and moves > dies_after
            and not any(isinstance(m, InstallSnapshot) for m in replica.inbox)
        ):
            to, replica = replica.shard, None  # messages to it and to workers are lost
            for worker in workers:  # the backup has no pushes that were not applied
                worker.pushed.clear()
        able = [w for w in workers if w.choices()]
        if replica is not None and replica.inbox and (not able or chance.random() < 0.5):
            for _ in deliver(replica.handle_one(to), workers):
                pass
            continue
        worker = chance.choice(able)
        what, part = chance.choice(worker.choices())
        out = worker.act(what, part, to)
        for value in deliver(out if replica is None else replica.queue(out), workers):
            if replica is not None:
                assert (
                    replica.shard.held[value.part].clock >= value.clock
                )  # the backup has it before the worker
    if staleness == 0:
        for found, expected in zip(to.held.values(), reference_values(2, 3), strict=True):
            assert torch.equal(found.values, expected)
    assert all(steps == 3 for done in to.done.values() for steps in done.values())


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
