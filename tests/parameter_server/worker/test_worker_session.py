"""A worker's session under thousands of schedules, with real shards and a real arbiter around it.

Messages wait on connections that are cut, answers come twice, servers die or stand still, and
partitions move: every push is applied once, every answer arrives, every value is of its step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.errors import ServerLost
from shoal.parameter_server.codec import Op
from shoal.parameter_server.coordinator.coordinator import Coordinator, View
from shoal.parameter_server.coordinator.placement import Move, Placement
from shoal.parameter_server.events import (
    GradNormResponse,
    InstallSnapshot,
    InSync,
    LoadDone,
    NotOwner,
    Outgoing,
    PartitionTransfer,
    PullResponse,
    ReplicateUpdate,
    StepRequest,
    TransferDone,
)
from shoal.parameter_server.node.shard import Shard
from shoal.parameter_server.optimizer_spec import OptimizerSpec, recipe_of, settings_of
from shoal.parameter_server.partitioning import ParamMeta, partition
from shoal.parameter_server.worker.session import WorkerSession
from shoal.parameter_server.worker.worker_messages import (
    AnswerMessage,
    ConnectShard,
    DisconnectShard,
    NoticeMessage,
    NotOwnerMessage,
    PushMessage,
    QueryAnswered,
    QueryMessage,
    RetryLater,
    SessionAction,
    ShardFailed,
    ShardMessage,
    StepMessage,
    ToShard,
    ValuesArrived,
    ValuesMessage,
)

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
    """A replica of a shard; what `serve.py`, `replication.py` and `moving.py` do, without I/O."""

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

    given: PartitionTransfer
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


class World:
    """Two shards of two servers each, workers, an arbiter, and a network that loses connections."""

    def __init__(self, chance: Random, staleness: int | None) -> None:
        self.chance, self.staleness = chance, staleness
        sizes = [part.size_bytes for part in PARTS]
        self.arbiter = Coordinator([number % 2 for number in NUMBERS], sizes, 2, LEASE_S)
        self.now = 0.0
        self.troubles = chance.choice(
            [5, 30, 200]
        )  # then all is calm, and nothing makes up for a loss
        self.parcels: list[Parcel] = []
        self.given_out: dict[tuple[int, int, int], list[Tensor]] = {}
        self.servers = [self.new_server(number, number % 2) for number in range(4)]
        for server in self.servers:
            self.arbiter.join(server.number, server.shard_number, ("127.0.0.1", 1), 0.0)
            for other in self.servers:
                self.see_view(other)
        for server in self.servers:
            self.place(server)
        for part, owner in enumerate(self.arbiter.placement.owners):
            values = torch.ones(LENGTH, dtype=torch.float64)
            out = self.primary(owner).shard.load(0, part, values, [{}], 0)
            self.say(self.primary(owner), [o for o in out if isinstance(o, InstallSnapshot)])
        while any(queue for server in self.servers for queue in server.updates.values()):
            for server in self.servers:
                self.replicate(server)
        self.workers = [self.new_worker(number) for number in range(WORKERS)]

    def new_server(self, number: int, shard: int) -> Server:
        made = Shard(PARTS, recipe(), range(WORKERS), self.staleness, owned=())
        made.record()
        return Server(number, shard, made, View(shard))

    def new_worker(self, number: int) -> Worker:
        memory = [torch.ones(LENGTH, dtype=torch.float64) for _ in PARTS]
        asks = self.staleness == 0 and self.chance.random() < 0.5
        worker = Worker(number, WorkerSession(len(PARTS), self.staleness), memory, asks)
        self.do(worker, worker.session.placement_changed(self.arbiter.placement))
        return worker

    def primary(self, shard: int) -> Server:
        number = self.arbiter.views[shard].primary
        assert number is not None
        return self.servers[number]

    def act(self) -> None:
        """Let something happen, anywhere."""
        self.now += 0.01
        server, worker = self.chance.choice(self.servers), self.chance.choice(self.workers)
        match self.chance.randrange(18):
            case 0 if self.is_trouble(0.3):
                speeds = {shard: self.chance.choice([1.0, 3.0]) for shard in (0, 1)}
                self.arbiter.set_bandwidths(speeds)
            case 1:
                self.place(server)
                self.see_view(server)
            case 2:
                self.give(server)
            case 3 if self.parcels:
                self.take_in(self.chance.choice(self.parcels))
            case 4:
                self.do(worker, worker.session.placement_changed(self.arbiter.placement))
            case 5:
                self.tell_view(worker, self.chance.randrange(2))
            case 6 if worker.retries:
                retry = worker.retries.pop(self.chance.randrange(len(worker.retries)))
                self.do(worker, worker.session.resend(retry.partition, retry.op))
            case 7 if worker.wires and self.is_trouble(0.1):
                self.cut(worker, self.chance.choice(list(worker.wires)))
            case 8 if self.is_trouble(0.02):
                self.lose(server)
            case 9 | 10:
                self.replicate(server)
            case 11:
                self.connect(worker)
            case 12 | 13 if worker.wires:
                self.answer(worker, self.chance.choice(list(worker.wires.values())))
            case 14 | 15 if worker.wires:
                self.deliver(worker, self.chance.choice(list(worker.wires)))
            case _:
                self.work(worker)

    def is_trouble(self, probability: float) -> bool:
        """Decide that it is time for one more trouble, or not."""
        if not self.troubles or self.chance.random() > probability:
            return False
        self.troubles -= 1
        return True

    # Workers

    def work(self, worker: Worker) -> None:
        """One request of a worker's program, if it has to wait for nothing."""
        session = worker.session
        if self.chance.random() < 0.02:
            worker.shard_queries += 1
            shard = self.chance.choice(session.owners())
            if (Op.STATS, shard) in session._shard_queries:
                worker.shard_queries -= 1
                return
            self.do(worker, session.query_shard(shard, Op.STATS))
            return
        if session.step == STEPS:
            return
        here = set(NUMBERS) - set(session.missing(NUMBERS))
        unpushed = sorted(here - worker.pushed)
        if unpushed:
            number = self.chance.choice(unpushed)
            self.check_values(worker, number)
            worker.pushed.add(number)
            made = gradient(worker.number, session.step, number)
            self.do(worker, session.push(number, made, b"\1"))
        elif len(worker.pushed) < len(PARTS):
            return
        elif worker.asks and worker.norms is None:
            worker.norms = {}
            self.do(worker, session.query(Op.NORM, dict.fromkeys(NUMBERS, b"")))
        elif not worker.asks or (worker.norms is not None and len(worker.norms) == len(PARTS)):
            self.check_norms(worker)
            for number in NUMBERS:
                self.check_values(worker, number)  # nobody has written to them since
            worker.pushed, worker.norms = set(), None
            self.do(worker, session.request_step(b""))

    def check_values(self, worker: Worker, number: int) -> None:
        step = worker.session.step
        if self.staleness == 0:
            assert torch.equal(worker.memory[number], expected(step, number))
        elif step:
            given_out = self.given_out[worker.number, number, step]
            assert any(torch.equal(worker.memory[number], sent) for sent in given_out)

    def check_norms(self, worker: Worker) -> None:
        for number, squared in (worker.norms or {}).items():
            assert squared == float(summed(worker.session.step, number).square().sum())

    def tell_view(self, worker: Worker, shard: int) -> None:
        worker.views[shard] = self.arbiter.views[shard]
        self.do(worker, worker.session.view_changed(worker.views[shard]))

    def do(self, worker: Worker, actions: Iterable[SessionAction]) -> None:
        """Do what a session asks its network for."""
        for action in actions:
            match action:
                case ToShard(shard, message):
                    worker.wires[shard].to_server.append(message)
                case ConnectShard(shard):
                    worker.to_connect.add(shard)
                case DisconnectShard(shard):
                    self.cut(worker, shard)
                case RetryLater():
                    worker.retries.append(action)
                case QueryAnswered(Op.NORM, about, payload):
                    assert worker.norms is not None
                    assert about not in worker.norms
                    assert payload is not None
                    worker.norms[about] = float.fromhex(bytes(payload).decode())
                case QueryAnswered(Op.STATS):
                    worker.shard_answers += 1
                case ValuesArrived(partition, clock):
                    assert clock <= worker.session.step
                    assert partition in NUMBERS
                case _:
                    raise AssertionError(action)

    # Connections

    def connect(self, worker: Worker) -> None:
        """Connect to the primary of a shard, as far as the worker has heard."""
        shard = self.chance.randrange(2)
        view = worker.views.get(shard)
        if shard not in worker.to_connect or shard in worker.wires or view is None:
            return
        assert view.primary is not None
        server = self.servers[view.primary]
        if not server.is_primary:
            return
        before = server.wires.pop(worker.number, None)
        assert before is None
        wire = server.wires[worker.number] = worker.wires[shard] = Wire(server)
        self.do(worker, worker.session.connected(view))
        assert wire is worker.wires.get(shard, wire)

    def cut(self, worker: Worker, shard: int) -> None:
        """A connection ends, and all that is on its way with it."""
        wire = worker.wires.pop(shard)
        wire.server.wires.pop(worker.number, None)
        self.do(worker, worker.session.disconnected(shard))

    def deliver(self, worker: Worker, shard: int) -> None:
        """A message, or half of one that has values, comes to the worker."""
        wire = worker.wires[shard]
        if wire.begun is not None:
            if self.chance.random() < 0.7:
                return  # the rest of it is slow
            (message, numbers), counts = wire.begun
            wire.begun = None
            if counts:
                worker.memory[message.partition][LENGTH // 2 :] = numbers[LENGTH // 2 :]
            self.do(worker, worker.session.receive(shard, message))
        elif wire.to_worker:
            reply = wire.to_worker.popleft()
            if isinstance(reply, Delivered):
                counts = worker.session.accept(shard, reply.message)
                if counts:
                    half = slice(LENGTH // 2)
                    worker.memory[reply.message.partition][half] = reply.numbers[half]
                wire.begun = reply, counts
            else:
                self.do(worker, worker.session.receive(shard, reply))

    # Servers

    def answer(self, worker: Worker, wire: Wire) -> None:
        """One message of a worker comes to a server."""
        server = wire.server
        if not wire.to_server or not server.runs:
            return
        if not server.is_primary:
            self.cut(worker, server.shard_number)
            return
        message = wire.to_server.popleft()
        shard, number = server.shard, worker.number
        try:
            match message:
                case PushMessage(partition, step, pushed, present):
                    self.say(server, shard.push(number, step, partition, pushed, present))
                case StepMessage(step):
                    self.say(server, shard.request_step(number, step, order()))
                case QueryMessage(Op.NORM, partition, step):
                    self.say(server, shard.query_gradient(number, step, partition, as_tensor=False))
                case QueryMessage(Op.STATS, about):
                    wire.to_worker.append(AnswerMessage(Op.STATS, about, memoryview(b"{}")))
                case _:
                    raise AssertionError(message)
        except NotOwner as error:
            op = message.op if isinstance(message, QueryMessage) else Op.PUSH
            wire.to_worker.append(NotOwnerMessage(error.part, op))

    def say(self, server: Server, out: Iterable[Outgoing]) -> None:
        for message in out:
            match message:
                case ReplicateUpdate() | InstallSnapshot():
                    copied = message
                    if isinstance(message, ReplicateUpdate):
                        gradient_copy = message.update.gradient.clone()
                        update = message.update._replace(gradient=gradient_copy)
                        copied = message._replace(update=update)
                    server.updates.setdefault(message.backup, deque()).append(copied)
                case InSync(backup):
                    self.arbiter.in_sync(server.shard_number, backup, server.view.epoch)
                case TransferDone(part, since, giver):
                    self.arbiter.transfer_done(server.number, part, since, giver)
                case PullResponse(worker, part, clock, oldest, numbers):
                    self.given_out.setdefault((worker, part, clock), []).append(numbers.clone())
                    values = ValuesMessage(part, clock, oldest)
                    self.reply(server, worker, Delivered(values, numbers.clone()))
                case GradNormResponse(worker, part, squared):
                    payload = memoryview(squared.hex().encode())
                    self.reply(server, worker, AnswerMessage(Op.NORM, part, payload))
                case LoadDone():
                    pass
                case _:
                    raise AssertionError(message)

    def reply(self, server: Server, worker: int, reply: Reply) -> None:
        if worker in server.wires:
            server.wires[worker].to_worker.append(reply)

    def lose(self, server: Server) -> None:
        """A primary that has a backup dies, or stands still for ever."""
        view = self.arbiter.views[server.shard_number]
        if not server.is_primary or view.primary != server.number or not view.backups:
            return
        server.runs = False
        self.now += 2 * LEASE_S
        for other in self.servers:
            if other.runs:
                self.arbiter.heartbeat(other.number, self.now)
        self.arbiter.tick(self.now)
        if self.chance.random() < 0.5:
            for number in list(server.wires):
                self.cut(self.workers[number], server.shard_number)

    def see_view(self, server: Server) -> None:
        """Be what the arbiter says, as `replication.py` does."""
        view = self.arbiter.views[server.shard_number]
        if not server.runs or server.number not in view.members:
            return
        server.view = view
        if not server.is_primary:
            return
        known = server.shard.backups.clocks
        for backup in set(known) - set(view.members):
            self.say(server, server.shard.remove_backup(backup))
        for backup in set(view.backups) - set(known):
            server.shard.await_backup(backup)
        for backup in (*view.backups, *view.joining):
            if backup not in server.updates:
                server.updates[backup] = deque()
                in_sync = backup in view.backups
                self.say(server, server.shard.add_backup(backup, in_sync=in_sync))

    def replicate(self, server: Server) -> None:
        """A backup hears of one update of its primary, which hears that it has it."""
        queues = [(backup, queue) for backup, queue in server.updates.items() if queue]
        if not server.is_primary or not queues:
            return
        backup, queue = self.chance.choice(queues)
        update, to = queue.popleft(), self.servers[backup].shard
        out = (
            to.install_snapshot(update)
            if isinstance(update, InstallSnapshot)
            else to.apply_replicated(update)
        )
        acknowledged = out[0]
        filled = isinstance(update, InstallSnapshot)
        part, clock = acknowledged.part, acknowledged.clock  # type: ignore[union-attr]
        self.say(server, server.shard.on_ack(backup, part, clock, filled))

    def place(self, server: Server) -> None:
        if server.runs:
            placement = server.placement = self.arbiter.placement
            mine = placement.owned_by(server.shard_number)
            coming = placement.arriving_at(server.shard_number)
            server.shard.set_ownership(mine, mine & set(placement.moving), coming)

    def give(self, server: Server) -> None:
        """Under the placement that the server was told of last."""
        if not server.is_primary or server.placement is None:
            return
        for part, move in server.placement.moving.items():
            given_away = server.shard.export_partition(part)
            if given_away is not None:
                self.parcels.append(
                    Parcel(given_away, move.start_version, server.number, move.target)
                )

    def take_in(self, parcel: Parcel) -> None:
        if self.chance.random() < 0.7:
            self.parcels = [other for other in self.parcels if other is not parcel]
        target = self.primary(parcel.target)
        if target.is_primary:
            out = target.shard.import_partition(parcel.given, parcel.since, parcel.giver)
            self.say(target, out)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), staleness=st.sampled_from([0, 0, 1, None]))
@example(seed=255, staleness=0)  # a move that began and was called off while nobody looked
def test_every_schedule_applies_each_push_once_and_loses_no_answer(
    seed: int, staleness: int | None
) -> None:
    world = World(Random(seed), staleness)
    for _ in range(60_000):
        if all(worker.is_done for worker in world.workers):
            break
        world.act()
    assert all(worker.is_done for worker in world.workers), "it has come to a stand"
    for part, owner in enumerate(world.arbiter.placement.owners):
        held = world.primary(owner).shard
        assert held.done[part] == dict.fromkeys(range(WORKERS), STEPS)
        assert torch.equal(held.held[part].values, expected(STEPS, part))
        for worker in world.workers:
            world.check_values(worker, part)


HERE = ("127.0.0.1", 1)


def session_of(placement: Placement, *connected: int) -> WorkerSession:
    """A session that is connected to these shards, each of which has a server of its number."""
    session = WorkerSession(len(placement.owners))
    session.placement_changed(placement)
    for shard in connected:
        view = View(shard, epoch=1, primary=shard, addresses={shard: HERE})
        assert session.connected(view) == []
    return session


def pushes(actions: Sequence[SessionAction]) -> list[tuple[int, int]]:
    """The shard and the partition of each push."""
    return [
        (action.shard, action.message.partition)
        for action in actions
        if isinstance(action, ToShard) and isinstance(action.message, PushMessage)
    ]


def pushed(session: WorkerSession, partition: int) -> list[tuple[int, int]]:
    return pushes(session.push(partition, gradient(0, 0, partition), b"\1"))


def test_every_shard_that_is_new_is_to_be_connected_once():
    session = WorkerSession(2)
    moving = Placement(1, (1, 1), {0: Move(2, 1)})
    assert session.placement_changed(moving) == [ConnectShard(shard) for shard in (0, 1, 2)]
    assert session.placement_changed(Placement(2, (2, 1))) == []
    assert session.placement_changed(Placement(2, (3, 3))) == []  # it is no newer


def test_a_push_waits_for_the_end_of_a_move_and_then_goes_to_the_new_owner():
    session = session_of(Placement(1, (0, 1)), 0, 1)
    assert pushed(session, 1) == [(1, 1)]
    assert session.placement_changed(Placement(2, (0, 1), {0: Move(1, 2)})) == []
    assert pushed(session, 0) == []
    assert session.resend(0, Op.PUSH) == []
    assert pushes(session.placement_changed(Placement(3, (1, 1)))) == [(1, 0)]


def test_a_move_that_is_called_off_sends_what_has_waited_to_the_old_owner():
    session = session_of(Placement(1, (0, 1), {0: Move(1, 1)}), 0, 1)
    pushed(session, 0)
    assert pushes(session.placement_changed(Placement(2, (0, 1)))) == [(0, 0)]


def test_what_an_owner_may_have_forgotten_in_a_move_that_was_missed_is_sent_again():
    session = session_of(Placement(1, (0, 1)), 0, 1)
    pushed(session, 0)
    assert session.placement_changed(Placement(2, (0, 1))) == []
    assert pushes(session.placement_changed(Placement(4, (0, 1)))) == [(0, 0)]


def test_a_new_owner_is_sent_nothing_while_the_old_one_still_writes_the_values():
    session = session_of(Placement(1, (0, 1)), 0, 1)
    pushed(session, 0)
    session.request_step(b"")
    values = ValuesMessage(0, clock=1, oldest=1)
    assert session.accept(0, values)
    assert session.placement_changed(Placement(2, (1, 1))) == []
    assert not session.accept(1, values)  # one that was on its way from an earlier stay there
    assert session.receive(1, values) == []
    assert pushes(session.receive(0, values)) == [(1, 0)]
    assert session.missing([0]) == [0]
    assert session.accept(1, values)
    assert session.receive(1, values) == [ValuesArrived(0, 1)]
    assert session.missing([0]) == []


def test_a_new_owner_is_sent_what_has_waited_when_the_old_ones_connection_is_lost():
    session = session_of(Placement(1, (0, 1)), 0, 1)
    pushed(session, 0)
    session.request_step(b"")
    assert session.accept(0, ValuesMessage(0, clock=1, oldest=1))
    assert session.placement_changed(Placement(2, (1, 1))) == []
    assert pushes(session.disconnected(0)) == [(1, 0)]


def test_values_that_were_not_written_count_neither_when_their_shard_is_the_owner_by_then():
    session = session_of(Placement(1, (0, 1)), 0, 1)
    session.request_step(b"")
    values = ValuesMessage(0, clock=1, oldest=1)
    assert not session.accept(1, values)
    session.placement_changed(Placement(2, (1, 1)))
    assert session.receive(1, values) == []
    assert session.missing([0]) == [0]


def test_a_lost_connection_is_made_up_for_by_everything_without_an_answer():
    session = session_of(Placement(1, (0, 0, 1)), 0, 1)
    session.record()
    for number in range(3):
        pushed(session, number)
    session.request_step(b"step")
    first = ValuesMessage(0, clock=1, oldest=1)
    session.accept(0, first)
    session.receive(0, first)
    session.query(Op.STATE, {1: b""})
    session.query_shard(0, Op.STATS)
    session.disconnected(0)
    assert session.query(Op.GRADIENT, {1: b""}) == []
    successor = View(0, epoch=2, primary=7, addresses={7: HERE})
    messages = [
        action.message for action in session.connected(successor) if isinstance(action, ToShard)
    ]
    assert messages[0] == NoticeMessage(Op.RECORD)
    assert isinstance(messages[1], PushMessage)
    assert messages[1].partition == 1
    assert messages[2:] == [
        QueryMessage(Op.STATE, 1, 1, b""),
        QueryMessage(Op.GRADIENT, 1, 1, b""),
        StepMessage(0, b"step"),
        QueryMessage(Op.STATS, 0, 1, b""),
    ]


def test_a_server_that_was_replaced_while_it_was_called_is_hung_up_on():
    session = session_of(Placement(1, (0,)))
    old = View(0, epoch=1, primary=3, addresses={3: HERE})
    new = View(0, epoch=2, primary=4, addresses={4: HERE})
    session.view_changed(new)
    assert session.connected(old) == [DisconnectShard(0)]
    assert pushed(session, 0) == []
    assert pushes(session.connected(new)) == [(0, 0)]
    assert session.view_changed(new) == []
    assert session.view_changed(View(0, epoch=3, primary=5)) == [DisconnectShard(0)]


def test_a_query_is_answered_once_however_often_it_was_sent():
    session = session_of(Placement(1, (0,)), 0)
    session.query(Op.NORM, {0: b""})
    assert len(session.resend(0, Op.NORM)) == 1
    answer = AnswerMessage(Op.NORM, 0, memoryview(b"1"))
    assert session.receive(0, answer) == [QueryAnswered(*answer)]
    assert session.receive(0, answer) == []
    assert session.resend(0, Op.NORM) == []


def test_a_shard_that_has_left_answers_with_nothing():
    session = session_of(Placement(1, (0, 1)), 0, 1)
    session.query_shard(1, Op.HISTORY)
    retired = View(1, epoch=2, retired=True)
    actions = session.view_changed(retired)
    assert actions == [DisconnectShard(1), QueryAnswered(Op.HISTORY, 1, None)]
    assert session.query_shard(1, Op.STATS) == [QueryAnswered(Op.STATS, 1, None)]


def test_a_pull_makes_values_count_again_that_are_no_newer():
    session = session_of(Placement(1, (0,)), 0)
    session.begin()
    values = ValuesMessage(0, clock=0, oldest=0)
    assert not session.accept(0, values)
    session.receive(0, values)
    session.pull()
    assert session.missing([0]) == [0]
    assert session.accept(0, values)
    assert session.receive(0, values) == [ValuesArrived(0, 0)]
    assert session.resend(0, Op.PULL) == []


def test_values_that_are_too_stale_are_not_believed():
    session = WorkerSession(1, staleness=1)
    session.placement_changed(Placement(1, (0,)))
    for _ in range(3):
        session.request_step(b"")
    with pytest.raises(AssertionError):
        session.accept(0, ValuesMessage(0, clock=3, oldest=1))


def test_the_first_shard_that_is_lost_is_the_failure():
    session = WorkerSession(1)
    (first,) = session.fail(1, "it burned")
    session.fail(2, "it drowned")
    assert isinstance(first, ShardFailed)
    assert isinstance(session.failure, ServerLost)
    assert "shard 1 of the parameter servers is lost: it burned" in str(session.failure)


def test_all_workers_are_asked_to_stop_until_one_step_is_known():
    session = session_of(Placement(1, (0,)), 0)
    stop: ShardMessage = NoticeMessage(Op.STOP)
    assert session.request_stop() == [ToShard(0, stop)]
    session.request_step(b"")
    values = ValuesMessage(0, clock=1, oldest=1, stop_at=4)
    session.accept(0, values)
    session.receive(0, values)
    assert session.stop_at == 4
    assert session.request_stop() == []
