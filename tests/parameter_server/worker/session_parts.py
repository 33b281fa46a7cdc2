"""Workers, servers and connections of the simulation of test_session_schedules.py."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoal.parameter_server.coordinator.coordinator import Placement, View
from shoal.parameter_server.events import (
    InstallSnapshot,
    PartitionCopy,
    ReplicateUpdate,
    StepRequest,
)
from shoal.parameter_server.node.shard import Shard
from shoal.parameter_server.optimizer_spec import OptimizerSpec, recipe_of, settings_of
from shoal.parameter_server.partitioning import ParamMeta, partition
from shoal.parameter_server.worker.session import (
    AnswerMessage,
    NotOwnerMessage,
    RetryLater,
    ShardMessage,
    ValuesMessage,
    WorkerSession,
)

HERE = ("127.0.0.1", 1)
LENGTH = 4
PARTS = partition(
    {name: ParamMeta(LENGTH, torch.float64, 0) for name in "abcde"}, part_bytes=8 * LENGTH
)
NUMBERS = range(len(PARTS))
WORKERS = 2
STEPS = 3
LEASE_S = 2.0


def recipe() -> OptimizerSpec:
    return recipe_of(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0))


def order() -> StepRequest:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    return StepRequest([settings_of(group) for group in optimizer.param_groups])


@cache
def gradient(worker: int, step: int, partition: int) -> Tensor:
    """Whole numbers, so that sums are exact in any order."""
    chance = Random(f"{worker} {step} {partition}")
    numbers = [chance.randrange(-(2**20), 2**20) for _ in range(LENGTH)]
    return torch.tensor(numbers, dtype=torch.float64)


@cache
def summed(step: int, partition: int) -> Tensor:
    return torch.stack([gradient(worker, step, partition) for worker in range(WORKERS)]).sum(0)


@cache
def expected(steps: int, partition: int) -> Tensor:
    """Values after all pushes of so many steps, each applied once."""
    values = torch.ones(LENGTH, dtype=torch.float64)
    for step in range(steps):
        values = values - summed(step, partition)
    return values


class Delivered(NamedTuple):
    """Values as a server sent them."""

    message: ValuesMessage
    numbers: Tensor


Reply = Delivered | AnswerMessage | NotOwnerMessage


@dataclass
class Wire:
    """A connection of one worker with one server."""

    server: Server
    to_server: deque[ShardMessage] = field(default_factory=deque)
    to_worker: deque[Reply] = field(default_factory=deque)
    begun: tuple[Delivered, bool] | None = None


@dataclass
class Server:
    """A replica of a shard; as in `node_server.py`, `replication.py` and `migration.py`."""

    number: int
    shard_number: int
    shard: Shard
    view: View
    runs: bool = True
    wires: dict[int, Wire] = field(default_factory=dict)  # by worker
    updates: dict[int, deque[ReplicateUpdate | InstallSnapshot]] = field(
        default_factory=dict
    )  # by backup
    placement: Placement | None = None

    @property
    def is_primary(self) -> bool:
        return self.runs and self.view.primary == self.number


class Parcel(NamedTuple):
    """A partition on its way between two shards."""

    given: PartitionCopy
    since: int
    giver: int
    target: int


@dataclass
class Worker:
    """A program around a session: pushes in any order, asks for norms, and requests steps."""

    number: int
    session: WorkerSession
    memory: list[Tensor]
    asks: bool
    wires: dict[int, Wire] = field(default_factory=dict)  # by shard
    pushed: set[int] = field(default_factory=set)
    norms: dict[int, float] | None = None
    retries: list[RetryLater] = field(default_factory=list)
    views: dict[int, View] = field(default_factory=dict)
    shard_answers: int = 0
    shard_queries: int = 0
    to_connect: set[int] = field(default_factory=set)

    @property
    def is_done(self) -> bool:
        done = self.session.step == STEPS and not self.session.missing(NUMBERS)
        return done and self.shard_answers == self.shard_queries
