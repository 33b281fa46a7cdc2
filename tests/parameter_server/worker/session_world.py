"""Workers, servers, a coordinator and a network in one process, one event after the other."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import torch
from session_parts import (
    LEASE_S,
    LENGTH,
    NUMBERS,
    PARTS,
    STEPS,
    WORKERS,
    Delivered,
    Parcel,
    Wire,
    Worker,
    expected,
    gradient,
    summed,
)
from session_servers import SimulatedServers
from torch import Tensor

from shoal.parameter_server.codec import Op
from shoal.parameter_server.coordinator.coordinator import Coordinator, Move
from shoal.parameter_server.events import InstallSnapshot
from shoal.parameter_server.worker.session import (
    ConnectShard,
    DisconnectShard,
    QueryAnswered,
    RetryLater,
    SessionAction,
    ToShard,
    ValuesArrived,
    WorkerSession,
)


class World(SimulatedServers):
    """Two shards of two servers each, workers, a coordinator, and a network that loses messages."""

    def __init__(self, chance: Random, staleness: int | None) -> None:
        self.chance, self.staleness = chance, staleness
        sizes = [part.size_bytes for part in PARTS]
        self.coordinator = Coordinator([number % 2 for number in NUMBERS], sizes, 2, LEASE_S)
        self.now = 0.0
        self.troubles = chance.choice(
            [5, 30, 200]
        )  # then all is calm, and nothing makes up for a loss
        self.parcels: list[Parcel] = []
        self.given_out: dict[tuple[int, int, int], list[Tensor]] = {}
        self.servers = [self.new_server(number, number % 2) for number in range(4)]
        for server in self.servers:
            self.coordinator.join(server.number, server.shard_number, ("127.0.0.1", 1), 0.0)
            for other in self.servers:
                self.see_view(other)
        for server in self.servers:
            self.place(server)
        for part, owner in enumerate(self.coordinator.placement.owners):
            values = torch.ones(LENGTH, dtype=torch.float64)
            out = self.primary(owner).shard.load(0, part, values, [{}], 0)
            self.say(self.primary(owner), [o for o in out if isinstance(o, InstallSnapshot)])
        while any(queue for server in self.servers for queue in server.updates.values()):
            for server in self.servers:
                self.replicate(server)
        self.workers = [self.new_worker(number) for number in range(WORKERS)]

    def new_worker(self, number: int) -> Worker:
        memory = [torch.ones(LENGTH, dtype=torch.float64) for _ in PARTS]
        asks = self.staleness == 0 and self.chance.random() < 0.5
        worker = Worker(number, WorkerSession(len(PARTS), self.staleness), memory, asks)
        self.do(worker, worker.session.placement_changed(self.coordinator.placement))
        return worker

    def act(self) -> None:
        """Let something happen, anywhere."""
        self.now += 0.01
        server, worker = self.chance.choice(self.servers), self.chance.choice(self.workers)
        match self.chance.randrange(18):
            case 0 if self.is_trouble(0.3):
                self.begin_move(self.chance.choice(PARTS).number)
            case 1:
                self.place(server)
                self.see_view(server)
            case 2:
                self.give(server)
            case 3 if self.parcels:
                self.take_in(self.chance.choice(self.parcels))
            case 4:
                self.do(worker, worker.session.placement_changed(self.coordinator.placement))
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

    def begin_move(self, partition: int) -> None:
        """Let a partition migrate to the other shard, or cancel that."""
        moving = dict(self.coordinator.placement.moving)
        if moving.pop(partition, None) is None:
            target = 1 - self.coordinator.placement.owners[partition]
            moving[partition] = Move(target, self.coordinator.placement.version + 1)
        self.coordinator._replace_placement(moving=moving)

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
        worker.views[shard] = self.coordinator.views[shard]
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
