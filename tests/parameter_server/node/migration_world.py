"""Shards, workers and a coordinator in one process, whose messages come late or twice."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

import torch
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
from shoal.parameter_server.partitioning import ParamMeta, partition

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
