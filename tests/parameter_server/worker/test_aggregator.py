"""Aggregators of two machines in front of two shards, under hundreds of schedules."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.parameter_server.codec import Op, pack_order, pack_partition
from shoal.parameter_server.coordinator.coordinator import View
from shoal.parameter_server.coordinator.placement import Placement
from shoal.parameter_server.events import (
    GradNormResponse,
    GradResponse,
    LoadDone,
    NotOwner,
    Outgoing,
    ProtocolViolation,
    PullResponse,
    StepRequest,
)
from shoal.parameter_server.node.shard import Shard
from shoal.parameter_server.optimizer_spec import OptimizerSpec, recipe_of, settings_of
from shoal.parameter_server.partitioning import ParamMeta, partition
from shoal.parameter_server.worker.aggregator import Aggregator
from shoal.parameter_server.worker.session import WorkerSession
from shoal.parameter_server.worker.worker_messages import (
    AnswerMessage,
    ConnectShard,
    PushMessage,
    QueryAnswered,
    QueryMessage,
    SessionAction,
    ShardMessage,
    StepMessage,
    ToShard,
    ValuesArrived,
    ValuesMessage,
)

LENGTH = 3
PARTS = partition(
    {name: ParamMeta(LENGTH, torch.float64, 0) for name in "abc"}, part_bytes=8 * LENGTH
)
NUMBERS = range(len(PARTS))
OWNERS = (0, 1, 0)
MACHINES = (2, 1)
"""Workers of each machine."""
STEPS = 3


def recipe() -> OptimizerSpec:
    return recipe_of(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0))


def order() -> bytes:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    return pack_order(StepRequest([settings_of(group) for group in optimizer.param_groups]))


def gradient(machine: int, worker: int, step: int, partition: int) -> Tensor:
    """Whole numbers, so that sums are exact in any order."""
    chance = Random(f"{machine} {worker} {step} {partition}")
    numbers = [float(chance.randrange(-1000, 1000)) for _ in range(LENGTH)]
    return torch.tensor(numbers, dtype=torch.float64)


def summed(step: int, partition: int) -> Tensor:
    workers = [
        (machine, worker) for machine, count in enumerate(MACHINES) for worker in range(count)
    ]
    return torch.stack([gradient(*worker, step, partition) for worker in workers]).sum(0)


class Machine:
    """An aggregator with its workers and its connections to the shards."""

    def __init__(self, number: int) -> None:
        self.number = number
        workers = range(MACHINES[number])
        self.shard = Shard(PARTS, recipe(), workers, snapshot=lambda _worker, _part, values: values)
        self.session = WorkerSession(len(PARTS))
        sums = [torch.zeros(LENGTH, dtype=torch.float64) for _ in PARTS]
        self.aggregator = Aggregator(self.shard, self.session, lambda n: sums[n], loads=number == 0)
        self.to_shards: list[deque[ShardMessage]] = [deque(), deque()]
        self.to_machine: list[deque[tuple[ValuesMessage, Tensor] | AnswerMessage]] = [
            deque(),
            deque(),
        ]
        self.clocks = [[-1] * len(PARTS) for _ in workers]
        self.values: list[dict[int, Tensor]] = [{} for _ in workers]
        self.norms: list[dict[int, float]] = [{} for _ in workers]
        self.sums: list[dict[int, Tensor]] = [{} for _ in workers]
        self.pushed: list[set[int]] = [set() for _ in workers]
        self.asked = [False for _ in workers]
        self.steps = [0 for _ in workers]
        self.do(self.session.placement_changed(Placement(1, OWNERS)))
        for shard in (0, 1):
            self.do(self.session.connected(View(shard, epoch=1, primary=shard)))

    def do(self, actions: Iterable[Outgoing | SessionAction]) -> None:
        for action in actions:
            match action:
                case ToShard(shard, message):
                    if isinstance(message, PushMessage):
                        message = message._replace(gradient=message.gradient.clone())
                    self.to_shards[shard].append(message)
                case ConnectShard() | LoadDone():
                    pass
                case ValuesArrived() | QueryAnswered():
                    self.do(self.aggregator.receive(action))
                case PullResponse(worker, part, clock, _, numbers):
                    assert clock > self.clocks[worker][part], "it was told twice"
                    self.clocks[worker][part] = clock
                    self.values[worker][part] = numbers.clone()
                case GradNormResponse(worker, part, squared):
                    self.norms[worker][part] = squared
                case GradResponse(worker, part, numbers):
                    self.sums[worker][part] = numbers
                case _:
                    raise AssertionError(action)

    def load(self) -> None:
        for part in PARTS:
            values = torch.ones(LENGTH, dtype=torch.float64)
            self.do(self.aggregator.load(0, part.number, pack_partition(values, [{}], {}), 0))

    def is_done(self) -> bool:
        return all(clock == STEPS for clocks in self.clocks for clock in clocks)

    def work(self, worker: int, chance: Random) -> None:
        """One message of a worker: it pushes, asks for norms and a sum, and takes the step."""
        step, clocks = self.steps[worker], self.clocks[worker]
        unpushed = set(NUMBERS) - self.pushed[worker]
        here = sorted(part for part in unpushed if clocks[part] == step or step == 0)
        if step == STEPS:
            return
        if here:
            part = chance.choice(here)
            self.pushed[worker].add(part)
            made = gradient(self.number, worker, step, part)
            self.do(self.aggregator.push(worker, step, part, made, b"\1"))
        elif not unpushed and not self.asked[worker]:
            self.asked[worker] = True
            self.do(self.aggregator.query(worker, step, Op.GRADIENT, 1))
            for part in NUMBERS:
                self.do(self.aggregator.query(worker, step, Op.NORM, part))
        elif len(self.norms[worker]) == len(PARTS) and self.sums[worker]:
            for part, squared in self.norms[worker].items():
                assert squared == float(summed(step, part).square().sum())
            assert torch.equal(self.sums[worker][1], summed(step, 1))
            self.norms[worker], self.sums[worker] = {}, {}
            self.pushed[worker], self.asked[worker] = set(), False
            self.steps[worker] += 1
            self.do(self.aggregator.request_step(worker, step, order()))

    def receive(self, shard: int) -> None:
        """One message of a shard."""
        message = self.to_machine[shard].popleft()
        if isinstance(message, AnswerMessage):
            self.do(self.session.receive(shard, message))
            return
        values, numbers = message
        if self.session.accept(shard, values):
            self.shard.held[values.partition].values.copy_(numbers)
        self.do(self.session.receive(shard, values))


class World:
    def __init__(self) -> None:
        mine = [{part for part in NUMBERS if OWNERS[part] == shard} for shard in (0, 1)]
        self.shards = [Shard(PARTS, recipe(), range(len(MACHINES)), owned=owned) for owned in mine]
        self.machines = [Machine(number) for number in range(len(MACHINES))]
        for machine in self.machines:
            machine.load()
        first = self.machines[0]
        for shard in (0, 1):  # workers begin when the servers have their first numbers
            while first.to_shards[shard]:
                self.answer(first, shard, first.to_shards[shard].popleft())
                first.receive(shard)

    def act(self, chance: Random) -> None:
        machine, shard = chance.choice(self.machines), chance.randrange(2)
        match chance.randrange(3):
            case 0:
                machine.work(chance.randrange(MACHINES[machine.number]), chance)
            case 1 if machine.to_shards[shard]:
                self.answer(machine, shard, machine.to_shards[shard].popleft())
            case 2 if machine.to_machine[shard]:
                machine.receive(shard)

    def answer(self, machine: Machine, number: int, message: ShardMessage) -> None:
        shard, worker = self.shards[number], machine.number
        match message:
            case PushMessage(partition, step, pushed, present):
                self.say(number, shard.push(worker, step, partition, pushed, present))
            case StepMessage(step):
                settings_ = StepRequest([{"lr": 1.0}])
                self.say(number, shard.request_step(worker, step, settings_))
            case QueryMessage(Op.LOAD, partition, step):
                values = torch.ones(LENGTH, dtype=torch.float64)
                self.say(number, shard.load(worker, partition, values, [{}], step))
            case QueryMessage(op, partition, step):
                self.say(
                    number,
                    shard.query_gradient(worker, step, partition, as_tensor=op == Op.GRADIENT),
                )

    def say(self, number: int, out: Iterable[Outgoing]) -> None:
        for message in out:
            match message:
                case PullResponse(worker, part, clock, oldest, numbers):
                    values = ValuesMessage(part, clock, oldest)
                    self.machines[worker].to_machine[number].append((values, numbers.clone()))
                case GradNormResponse(worker, part, squared):
                    answer = AnswerMessage(Op.NORM, part, memoryview(squared.hex().encode()))
                    self.machines[worker].to_machine[number].append(answer)
                case GradResponse(worker, part, numbers, present):
                    payload = memoryview(present + numbers.numpy().tobytes())
                    answer = AnswerMessage(Op.GRADIENT, part, payload)
                    self.machines[worker].to_machine[number].append(answer)
                case LoadDone(worker, part):
                    answer = AnswerMessage(Op.LOAD, part, memoryview(b""))
                    self.machines[worker].to_machine[number].append(answer)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_schedule_gives_every_worker_the_values_of_all_pushes(seed: int) -> None:
    chance, world = Random(seed), World()
    for _ in range(20_000):
        if all(machine.is_done() for machine in world.machines):
            break
        world.act(chance)
    assert all(machine.is_done() for machine in world.machines), "it has come to a stand"
    for part in NUMBERS:
        expected = torch.ones(LENGTH, dtype=torch.float64)
        for step in range(STEPS):
            expected = expected - summed(step, part)
        for machine in world.machines:
            assert all(torch.equal(values[part], expected) for values in machine.values)


def test_a_push_that_comes_again_is_forwarded_once_and_answered_again() -> None:
    machine = Machine(1)
    machine.load()
    again = gradient(1, 0, 0, 0)
    machine.do(machine.aggregator.push(0, 0, 0, again, b"\1"))
    machine.do(machine.aggregator.push(0, 0, 0, again, b"\1"))
    assert [message[:2] for message in machine.to_shards[0]] == [(0, 0)]
    machine.session.request_step(order())
    machine.to_machine[0].append((ValuesMessage(0, 1, 1), torch.zeros(LENGTH, dtype=torch.float64)))
    machine.receive(0)
    (answer,) = machine.aggregator.push(0, 0, 0, again, b"\1")
    assert isinstance(answer, PullResponse)
    assert answer.clock == 1


def test_what_is_no_request_for_a_step_or_not_here_is_refused() -> None:
    machine = Machine(1)
    with pytest.raises(ProtocolViolation):
        machine.aggregator.request_step(0, 0, b"nonsense")
    with pytest.raises(NotOwner):
        machine.aggregator.load(0, 9, b"", 0)
    with pytest.raises(NotOwner):
        machine.aggregator.query(0, 0, Op.NORM, 0)
