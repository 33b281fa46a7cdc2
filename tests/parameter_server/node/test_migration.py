"""Parts that move between shards while training goes on: in any order, given twice, given by
one that was replaced.
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


def told() -> StepRequest:
    return StepRequest([settings_of(group) for group in optimizer(torch.zeros(1)).param_groups])


def gradient(worker: int, step: int, part: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * worker + 10 * step + part)
    return torch.randn(3, dtype=torch.float64, generator=generator)


def by_hand(part: int, workers: int, steps: int) -> Tensor:
    parameter = nn.Parameter(torch.ones(3, dtype=torch.float64))
    stepped = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, weight_decay=0.01)
    for step in range(steps):
        total = gradient(0, step, part)
        for worker in range(1, workers):
            total = total + gradient(worker, step, part)
        parameter.grad = total
        stepped.step()
    return parameter.detach()


class Parcel(NamedTuple):
    """On its way between two shards."""

    given: PartitionTransfer
    since: int
    giver: int
    target: int


@dataclass
class Worker:
    """Routes by the placement that it knows, and says again what has found nobody."""

    number: int
    steps: int
    placement: Placement
    step: int = 0
    ordered: bool = False
    arrived: list[int] = field(default_factory=lambda: [0] * len(PARTS))
    said: set[int] = field(default_factory=set)

    @property
    def is_done(self) -> bool:
        return self.step == self.steps and all(clock == self.steps for clock in self.arrived)

    def learn(self, placement: Placement) -> None:
        for part in range(len(PARTS)):
            if self.placement.route(part) != placement.route(part):
                self.said.discard(part)
        self.placement = placement


class World:
    """Shards, workers, an arbiter, and a network that keeps, repeats and reorders what is given."""

    def __init__(self, chance: Random, workers: int, staleness: int | None, steps: int) -> None:
        self.chance = chance
        self.arbiter = Coordinator(
            [part.number % 2 for part in PARTS], [part.size_bytes for part in PARTS], 2, 2.0
        )
        for shard in (0, 1):
            self.arbiter.join(shard, shard, HERE, 0.0)
        placement = self.arbiter.placement
        self.shards = [
            Shard(PARTS, recipe(), range(workers), staleness, owned=placement.owned_by(shard))
            for shard in (0, 1)
        ]
        for part, owner in enumerate(placement.owners):
            self.shards[owner].load(0, part, torch.ones(3, dtype=torch.float64), [{}], 0)
        self.known = [placement, placement]
        self.workers = [Worker(number, steps, placement) for number in range(workers)]
        self.parcels: list[Parcel] = []

    def act(self) -> None:
        """Something happens."""
        match self.chance.randrange(9):
            case 0 if self.chance.random() < 0.3:
                self.arbiter.set_bandwidths(
                    {0: self.chance.choice([1.0, 3.0]), 1: self.chance.choice([1.0, 3.0])}
                )
            case 1:
                self.place(self.chance.randrange(2))
            case 2 | 3:
                self.give(self.chance.randrange(2))
            case 4 if self.parcels:
                self.deliver(self.chance.choice(self.parcels))
            case 5:
                self.chance.choice(self.workers).learn(self.arbiter.placement)
            case _:
                self.work(self.chance.choice(self.workers))

    def place(self, shard: int) -> None:
        placement = self.known[shard] = self.arbiter.placement
        mine = placement.owned_by(shard)
        self.shards[shard].set_ownership(
            mine, mine & set(placement.moving), placement.arriving_at(shard)
        )

    def give(self, shard: int) -> None:
        """Under the placement that the shard was told of last."""
        for part, move in self.known[shard].moving.items():
            found = self.shards[shard].export_partition(part)
            if found is not None:
                self.parcels.append(Parcel(found, move.start_version, shard, move.target))

    def deliver(self, parcel: Parcel) -> None:
        if self.chance.random() < 0.7:
            self.parcels = [other for other in self.parcels if other is not parcel]
        for out in self.shards[parcel.target].import_partition(
            parcel.given, parcel.since, parcel.giver
        ):
            assert isinstance(out, TransferDone)
            self.arbiter.transfer_done(parcel.target, out.part, out.start_version, out.source)

    def work(self, worker: Worker) -> None:
        """One message of a worker."""
        waiting = [part for part, clock in enumerate(worker.arrived) if clock < worker.step]
        if not waiting and worker.step < worker.steps:
            unsaid = [part for part in range(len(PARTS)) if part not in worker.said]
            if unsaid:
                self.push(worker, self.chance.choice(unsaid), worker.step)
            else:
                worker.step += 1
                for number, shard in enumerate(self.shards):
                    self.hear(number, shard.request_step(worker.number, worker.step - 1, told()))
        elif waiting:
            unsaid = [part for part in waiting if part not in worker.said]
            if unsaid:
                self.push(worker, self.chance.choice(unsaid), worker.step - 1)

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
        worker.said.add(part)
        self.hear(shard, out)

    def hear(self, shard: int, out: Iterable[Outgoing]) -> None:
        for value in out:
            assert isinstance(value, PullResponse)
            worker = self.workers[value.worker]
            if worker.placement.owners[value.part] != shard:
                continue
            assert value.clock == worker.step or value.clock <= worker.arrived[value.part]
            if value.clock > worker.arrived[value.part]:
                worker.arrived[value.part] = value.clock
                worker.said.discard(value.part)


@settings(max_examples=200)
@given(seed=st.integers(0, 2**32), staleness=st.sampled_from([0, 1, None]))
def test_every_schedule_of_moves_keeps_every_push_and_applies_it_once(
    seed: int, staleness: int | None
) -> None:
    steps = 4
    world = World(Random(seed), 2, staleness, steps)
    for _ in range(20_000):
        if all(worker.is_done for worker in world.workers):
            break
        world.act()
    assert all(worker.is_done for worker in world.workers), "it has come to a stand"
    for part, owner in enumerate(world.arbiter.placement.owners):
        held = world.shards[owner].held[part]
        assert held.clock == (steps if staleness == 0 else 2 * steps)
        assert world.shards[owner].done[part] == {0: steps, 1: steps}
        if staleness == 0:
            assert torch.equal(held.values, by_hand(part, 2, steps))


def test_a_new_shard_is_given_parts_when_its_first_server_is_there_and_not_before() -> None:
    arbiter = Coordinator([0, 0, 1, 1], [8, 8, 8, 8], 2, 2.0)
    arbiter.join(10, 0, HERE, 0.0)
    arbiter.join(11, 1, HERE, 0.0)
    assert arbiter.add().shard == 2
    assert not arbiter.placement.moving
    arbiter.join(12, 2, HERE, 0.0)
    ((part, move),) = arbiter.placement.moving.items()
    assert move.target == 2
    arbiter.transfer_done(12, part, move.start_version, source=10 + arbiter.placement.owners[part])
    assert arbiter.placement.owners[part] == 2


def test_a_new_shard_is_given_parts_when_all_its_replicas_have_what_it_has() -> None:
    arbiter = Coordinator([0, 0], [8, 8], 1, 2.0, replicas=2)
    arbiter.join(10, 0, HERE, 0.0)
    arbiter.add()
    arbiter.join(12, 1, HERE, 0.0)
    arbiter.join(13, 1, HERE, 0.0)
    assert arbiter.is_filling(1)
    assert (
        not arbiter.placement.moving
    )  # the loss of server 12 would be the loss of what it was given
    arbiter.in_sync(1, 13, arbiter.views[1].epoch)
    assert not arbiter.is_filling(1)
    assert [move.target for move in arbiter.placement.moving.values()] == [1]
    assert not arbiter.is_filling(
        0
    )  # what has parts from the beginning keeps them, whoever is there


def test_a_shard_that_leaves_ends_when_its_last_part_is_elsewhere() -> None:
    arbiter = Coordinator([0, 1, 1], [8, 8, 8], 2, 2.0)
    arbiter.join(10, 0, HERE, 0.0)
    arbiter.join(11, 1, HERE, 0.0)
    assert arbiter.remove(1) == ""
    assert arbiter.remove(1) == "shard 1 is leaving already"
    assert sorted(arbiter.placement.moving) == [1, 2]
    since = arbiter.placement.moving[1].start_version
    assert arbiter.transfer_done(10, 1, since, source=11) == []
    (retired,) = arbiter.transfer_done(10, 2, since, source=11)
    assert retired.retired
    assert retired.members == ()
    assert arbiter.placement.owners == (0, 0, 0)
    following = Coordinator([0, 1, 1], [8, 8, 8], 2, 2.0)
    following.from_json(arbiter.to_json(), 0.0)
    assert following.placement == arbiter.placement
    assert following.views == arbiter.views


def test_a_shard_that_leaves_with_nothing_ends_at_once_and_one_of_unknown_speed_counts_as_the_others() -> (
    None
):
    arbiter = Coordinator([0, 0, 1, 1], [8, 8, 8, 8], 2, 2.0)
    arbiter.join(10, 0, HERE, 0.0)
    arbiter.join(11, 1, HERE, 0.0)
    arbiter.set_bandwidths({0: 1e9, 1: 1e9})
    arbiter.add()
    arbiter.join(12, 2, HERE, 0.0)
    assert len(arbiter.placement.moving) == 1
    arbiter.remove(2)
    assert not arbiter.placement.moving
    (retired,) = arbiter.tick(0.1)
    assert retired.shard == 2
    assert retired.retired


def test_a_part_given_by_a_server_that_was_replaced_is_not_accepted() -> None:
    arbiter = Coordinator([0, 1], [8, 8], 2, 2.0)
    arbiter.join(10, 0, HERE, 0.0)
    arbiter.join(11, 1, HERE, 0.0)
    arbiter.join(12, 1, HERE, 0.0)
    arbiter.in_sync(1, 12, arbiter.views[1].epoch)
    arbiter.remove(1)
    since = arbiter.placement.moving[1].start_version
    arbiter.heartbeat(10, 5.0)
    arbiter.heartbeat(12, 5.0)
    arbiter.tick(5.0)  # 11 has been silent, 12 takes over
    arbiter.transfer_done(10, 1, since, source=11)
    assert arbiter.placement.owners == (0, 1)
    arbiter.transfer_done(10, 1, since, source=12)
    assert arbiter.placement.owners == (0, 0)


def test_a_new_shard_that_dies_before_it_owns_anything_costs_nothing() -> None:
    arbiter = Coordinator([0, 0], [8, 8], 1, 2.0)
    arbiter.join(10, 0, HERE, 0.0)
    arbiter.add()
    arbiter.join(11, 1, HERE, 0.0)
    assert arbiter.placement.moving
    arbiter.heartbeat(10, 5.0)
    arbiter.disconnected(11)
    (gone,) = arbiter.tick(5.0)
    assert gone.retired
    assert not gone.lost
    assert not arbiter.placement.moving


@pytest.mark.parametrize(
    ("shard", "words"),
    [(0, "shard 0 stays"), (5, "there is no shard 5; there are 0, 1"), (-1, "no shard -1")],
)
def test_what_cannot_be_removed_is_said(shard: int, words: str) -> None:
    arbiter = Coordinator([0, 1], [8, 8], 2, 2.0)
    assert words in arbiter.remove(shard)


@given(
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=30),
    speeds=st.lists(st.sampled_from([1.0, 2.0]), min_size=1, max_size=5),
    seed=st.integers(0, 100),
)
def test_no_single_move_would_make_it_better_after_a_rebalance(
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
