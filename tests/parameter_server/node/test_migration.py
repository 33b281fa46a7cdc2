"""Partitions that migrate between shards during training: in any order, with transfers that are
repeated, reordered or sent by a server that was replaced.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.parameter_server.coordinator.coordinator import Coordinator
from shoal.parameter_server.coordinator.placement import Placement
from shoal.parameter_server.events import (
    NotOwner,
    Outgoing,
    PartitionTransfer,
    PullResponse,
    StepRequest,
    TransferDone,
)
from shoal.parameter_server.node.shard import Shard
from shoal.parameter_server.optimizer_spec import OptimizerSpec, recipe_of, settings_of
from shoal.parameter_server.partitioning import ParamMeta, partition, rebalance

PARTS = partition({name: ParamMeta(3, torch.float64, 0) for name in "abcde"}, part_bytes=24)
HERE = ("127.0.0.1", 1)


def optimizer(values: Tensor) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(values)], lr=0.1, momentum=0.9, weight_decay=0.01)


def recipe() -> OptimizerSpec:
    return recipe_of(optimizer(torch.zeros(1)))


def step_request() -> StepRequest:
    return StepRequest([settings_of(group) for group in optimizer(torch.zeros(1)).param_groups])


def gradient(worker: int, step: int, part: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * worker + 10 * step + part)
    return torch.randn(3, dtype=torch.float64, generator=generator)


def reference_values(part: int, workers: int, steps: int) -> Tensor:
    parameter = nn.Parameter(torch.ones(3, dtype=torch.float64))
    stepped = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, weight_decay=0.01)
    for step in range(steps):
        total = gradient(0, step, part)
        for worker in range(1, workers):
            total = total + gradient(worker, step, part)
        parameter.grad = total
        stepped.step()
    return parameter.detach()


class TransferMessage(NamedTuple):
    """A transfer between two shards that is on its way."""

    transfer: PartitionTransfer
    start_version: int
    source: int
    target: int


@dataclass
class Worker:
    """Routes by the placement that it knows, and resends what no shard has answered."""

    number: int
    steps: int
    placement: Placement
    step: int = 0
    ordered: bool = False
    arrived: list[int] = field(default_factory=lambda: [0] * len(PARTS))
    sent: set[int] = field(default_factory=set)

    @property
    def is_done(self) -> bool:
        return self.step == self.steps and all(clock == self.steps for clock in self.arrived)

    def learn(self, placement: Placement) -> None:
        for part in range(len(PARTS)):
            if self.placement.route(part) != placement.route(part):
                self.sent.discard(part)
        self.placement = placement


class World:
    """Shards, workers, a coordinator, and a network that delays, repeats and reorders transfers."""

    def __init__(self, chance: Random, workers: int, staleness: int | None, steps: int) -> None:
        self.chance = chance
        self.coordinator = Coordinator(
            [part.number % 2 for part in PARTS], [part.size_bytes for part in PARTS], 2, 2.0
        )
        for shard in (0, 1):
            self.coordinator.join(shard, shard, HERE, 0.0)
        placement = self.coordinator.placement
        self.shards = [
            Shard(PARTS, recipe(), range(workers), staleness, owned=placement.owned_by(shard))
            for shard in (0, 1)
        ]
        for part, owner in enumerate(placement.owners):
            self.shards[owner].load(0, part, torch.ones(3, dtype=torch.float64), [{}], 0)
        self.known = [placement, placement]
        self.workers = [Worker(number, steps, placement) for number in range(workers)]
        self.transfers: list[TransferMessage] = []

    def act(self) -> None:
        """Do one random thing."""
        match self.chance.randrange(9):
            case 0 if self.chance.random() < 0.3:
                self.coordinator.set_bandwidths(
                    {0: self.chance.choice([1.0, 3.0]), 1: self.chance.choice([1.0, 3.0])}
                )
            case 1:
                self.place(self.chance.randrange(2))
            case 2 | 3:
                self.send(self.chance.randrange(2))
            case 4 if self.transfers:
                self.deliver(self.chance.choice(self.transfers))
            case 5:
                self.chance.choice(self.workers).learn(self.coordinator.placement)
            case _:
                self.work(self.chance.choice(self.workers))

    def place(self, shard: int) -> None:
        placement = self.known[shard] = self.coordinator.placement
        owned = placement.owned_by(shard)
        self.shards[shard].set_ownership(
            owned, owned & set(placement.moving), placement.arriving_at(shard)
        )

    def send(self, shard: int) -> None:
        """Send leaving partitions, by the newest placement that the shard knows."""
        for part, move in self.known[shard].moving.items():
            transfer = self.shards[shard].export_partition(part)
            if transfer is not None:
                message = TransferMessage(transfer, move.start_version, shard, move.target)
                self.transfers.append(message)

    def deliver(self, message: TransferMessage) -> None:
        if self.chance.random() < 0.7:
            self.transfers = [other for other in self.transfers if other is not message]
        for out in self.shards[message.target].import_partition(
            message.transfer, message.start_version, message.source
        ):
            assert isinstance(out, TransferDone)
            self.coordinator.transfer_done(message.target, out.part, out.start_version, out.source)

    def work(self, worker: Worker) -> None:
        """Send one message of a worker."""
        waiting = [part for part, clock in enumerate(worker.arrived) if clock < worker.step]
        if not waiting and worker.step < worker.steps:
            unsent = [part for part in range(len(PARTS)) if part not in worker.sent]
            if unsent:
                self.push(worker, self.chance.choice(unsent), worker.step)
            else:
                worker.step += 1
                for number, shard in enumerate(self.shards):
                    self.receive(
                        number, shard.request_step(worker.number, worker.step - 1, step_request())
                    )
        elif waiting:
            unsent = [part for part in waiting if part not in worker.sent]
            if unsent:
                self.push(worker, self.chance.choice(unsent), worker.step - 1)

    def push(self, worker: Worker, part: int, step: int) -> None:
        shard = worker.placement.route(part)
        if shard is None:
            return
        try:
            out = self.shards[shard].push(
                worker.number, step, part, gradient(worker.number, step, part), b"\1"
            )
        except NotOwner:
            return
        worker.sent.add(part)
        self.receive(shard, out)

    def receive(self, shard: int, out: Iterable[Outgoing]) -> None:
        for value in out:
            assert isinstance(value, PullResponse)
            worker = self.workers[value.worker]
            if worker.placement.owners[value.part] != shard:
                continue
            assert value.clock == worker.step or value.clock <= worker.arrived[value.part]
            if value.clock > worker.arrived[value.part]:
                worker.arrived[value.part] = value.clock
                worker.sent.discard(value.part)


@settings(max_examples=200)
@given(seed=st.integers(0, 2**32), staleness=st.sampled_from([0, 1, None]))
def test_every_schedule_of_migrations_applies_every_push_once(
    seed: int, staleness: int | None
) -> None:
    steps = 4
    world = World(Random(seed), 2, staleness, steps)
    for _ in range(20_000):
        if all(worker.is_done for worker in world.workers):
            break
        world.act()
    assert all(worker.is_done for worker in world.workers), "training has stopped"
    for part, owner in enumerate(world.coordinator.placement.owners):
        held = world.shards[owner].held[part]
        assert held.clock == (steps if staleness == 0 else 2 * steps)
        assert world.shards[owner].done[part] == {0: steps, 1: steps}
        if staleness == 0:
            assert torch.equal(held.values, reference_values(part, 2, steps))


def test_a_new_shard_gets_partitions_when_its_first_server_has_joined() -> None:
    coordinator = Coordinator([0, 0, 1, 1], [8, 8, 8, 8], 2, 2.0)
    coordinator.join(10, 0, HERE, 0.0)
    coordinator.join(11, 1, HERE, 0.0)
    assert coordinator.add().shard == 2
    assert not coordinator.placement.moving
    coordinator.join(12, 2, HERE, 0.0)
    ((part, move),) = coordinator.placement.moving.items()
    assert move.target == 2
    coordinator.transfer_done(
        12, part, move.start_version, source=10 + coordinator.placement.owners[part]
    )
    assert coordinator.placement.owners[part] == 2


def test_a_new_shard_gets_partitions_when_all_its_replicas_are_in_sync() -> None:
    coordinator = Coordinator([0, 0], [8, 8], 1, 2.0, replicas=2)
    coordinator.join(10, 0, HERE, 0.0)
    coordinator.add()
    coordinator.join(12, 1, HERE, 0.0)
    coordinator.join(13, 1, HERE, 0.0)
    assert coordinator.is_filling(1)
    assert (
        not coordinator.placement.moving
    )  # the loss of server 12 would be the loss of what it was given
    coordinator.in_sync(1, 13, coordinator.views[1].epoch)
    assert not coordinator.is_filling(1)
    assert [move.target for move in coordinator.placement.moving.values()] == [1]
    assert not coordinator.is_filling(
        0
    )  # what has parts from the beginning keeps them, whoever is there


def test_a_leaving_shard_retires_when_its_last_partition_has_migrated() -> None:
    coordinator = Coordinator([0, 1, 1], [8, 8, 8], 2, 2.0)
    coordinator.join(10, 0, HERE, 0.0)
    coordinator.join(11, 1, HERE, 0.0)
    assert coordinator.remove(1) == ""
    assert coordinator.remove(1) == "shard 1 is leaving already"
    assert sorted(coordinator.placement.moving) == [1, 2]
    since = coordinator.placement.moving[1].start_version
    assert coordinator.transfer_done(10, 1, since, source=11) == []
    (retired,) = coordinator.transfer_done(10, 2, since, source=11)
    assert retired.retired
    assert retired.members == ()
    assert coordinator.placement.owners == (0, 0, 0)
    following = Coordinator([0, 1, 1], [8, 8, 8], 2, 2.0)
    following.from_json(coordinator.to_json(), 0.0)
    assert following.placement == coordinator.placement
    assert following.views == coordinator.views


def test_shards_without_a_measured_bandwidth_count_as_average_ones() -> None:
    coordinator = Coordinator([0, 0, 1, 1], [8, 8, 8, 8], 2, 2.0)
    coordinator.join(10, 0, HERE, 0.0)
    coordinator.join(11, 1, HERE, 0.0)
    coordinator.set_bandwidths({0: 1e9, 1: 1e9})
    coordinator.add()
    coordinator.join(12, 2, HERE, 0.0)
    assert len(coordinator.placement.moving) == 1


def test_a_leaving_shard_without_partitions_retires_at_once() -> None:
    coordinator = Coordinator([0, 0, 1, 1], [8, 8, 8, 8], 2, 2.0)
    coordinator.join(10, 0, HERE, 0.0)
    coordinator.join(11, 1, HERE, 0.0)
    coordinator.set_bandwidths({0: 1e9, 1: 1e9})
    coordinator.add()
    coordinator.join(12, 2, HERE, 0.0)
    coordinator.remove(2)
    assert not coordinator.placement.moving
    (retired,) = coordinator.tick(0.1)
    assert retired.shard == 2
    assert retired.retired


def test_a_transfer_from_a_replaced_server_is_not_accepted() -> None:
    coordinator = Coordinator([0, 1], [8, 8], 2, 2.0)
    coordinator.join(10, 0, HERE, 0.0)
    coordinator.join(11, 1, HERE, 0.0)
    coordinator.join(12, 1, HERE, 0.0)
    coordinator.in_sync(1, 12, coordinator.views[1].epoch)
    coordinator.remove(1)
    since = coordinator.placement.moving[1].start_version
    coordinator.heartbeat(10, 5.0)
    coordinator.heartbeat(12, 5.0)
    coordinator.tick(5.0)  # 11 has been silent, 12 takes over
    coordinator.transfer_done(10, 1, since, source=11)
    assert coordinator.placement.owners == (0, 1)
    coordinator.transfer_done(10, 1, since, source=12)
    assert coordinator.placement.owners == (0, 0)


def test_a_new_shard_that_dies_before_it_owns_anything_loses_nothing() -> None:
    coordinator = Coordinator([0, 0], [8, 8], 1, 2.0)
    coordinator.join(10, 0, HERE, 0.0)
    coordinator.add()
    coordinator.join(11, 1, HERE, 0.0)
    assert coordinator.placement.moving
    coordinator.heartbeat(10, 5.0)
    coordinator.disconnected(11)
    (gone,) = coordinator.tick(5.0)
    assert gone.retired
    assert not gone.lost
    assert not coordinator.placement.moving


@pytest.mark.parametrize(
    ("shard", "words"),
    [(0, "shard 0 stays"), (5, "there is no shard 5; there are 0, 1"), (-1, "no shard -1")],
)
def test_the_reason_why_a_shard_cannot_be_removed_is_returned(shard: int, words: str) -> None:
    coordinator = Coordinator([0, 1], [8, 8], 2, 2.0)
    assert words in coordinator.remove(shard)


@given(
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=30),
    speeds=st.lists(st.sampled_from([1.0, 2.0]), min_size=1, max_size=5),
    seed=st.integers(0, 100),
)
def test_after_a_rebalance_no_single_move_would_improve_it(
    sizes: list[int], speeds: list[float], seed: int
) -> None:
    owners = [Random(seed + part).randrange(len(speeds) + 1) for part in range(len(sizes))]
    servers = dict(enumerate(speeds))
    moves = rebalance(sizes, owners, servers)
    after = [moves.get(part, owner) for part, owner in enumerate(owners)]
    assert set(after) <= set(servers)
    assert all(target != owners[part] for part, target in moves.items())
    given = {
        server: sum(s for s, owner in zip(sizes, after, strict=True) if owner == server)
        for server in servers
    }
    slowest = max(given[server] / servers[server] for server in servers)
    fullest = next(server for server in servers if given[server] / servers[server] == slowest)
    for part, owner in enumerate(after):
        for target in servers if owner == fullest else ():
            there = (given[target] + sizes[part]) / servers[target]
            assert (
                target == fullest
                or max(there, (given[fullest] - sizes[part]) / servers[fullest]) >= slowest
            )
