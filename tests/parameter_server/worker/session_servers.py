"""Servers of the simulation: real shards, whose messages wait until they are delivered."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from random import Random

from session_parts import (
    LEASE_S,
    PARTS,
    WORKERS,
    Delivered,
    Parcel,
    Reply,
    Server,
    Wire,
    Worker,
    order,
    recipe,
)
from torch import Tensor

from shoal.parameter_server.codec import Op
from shoal.parameter_server.coordinator.coordinator import Coordinator, View
from shoal.parameter_server.events import (
    GradNormResponse,
    InstallSnapshot,
    InSync,
    LoadDone,
    NotOwner,
    Outgoing,
    PullResponse,
    ReplicateUpdate,
    TransferDone,
)
from shoal.parameter_server.node.shard import Shard
from shoal.parameter_server.worker.session import (
    AnswerMessage,
    NotOwnerMessage,
    PushMessage,
    RequestMessage,
    ValuesMessage,
)


class SimulatedServers:
    """Two shards of two servers each, and the coordinator that says who is their primary.

    Attributes:
        given_out: (worker, partition, step) -> the values that were sent.
        parcels: partitions on their way from shard to shard.
    """

    chance: Random
    now: float
    staleness: int | None
    coordinator: Coordinator
    parcels: list[Parcel]
    given_out: dict[tuple[int, int, int], list[Tensor]]
    servers: list[Server]
    workers: list[Worker]

    def new_server(self, number: int, shard: int) -> Server:
        made = Shard(PARTS, recipe(), range(WORKERS), self.staleness, owned=())
        made.record()
        return Server(number, shard, made, View(shard))

    def primary(self, shard: int) -> Server:
        number = self.coordinator.views[shard].primary
        assert number is not None
        return self.servers[number]

    def cut(self, worker: Worker, shard: int) -> None:
        """A connection ends, and all that is on its way with it."""
        raise NotImplementedError

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
                case RequestMessage(Op.STEP, _, step):
                    self.say(server, shard.request_step(number, step, order()))
                case RequestMessage(Op.NORM, partition, step):
                    self.say(server, shard.query_gradient(number, step, partition, as_tensor=False))
                case RequestMessage(Op.STATS, about):
                    wire.to_worker.append(AnswerMessage(Op.STATS, about, memoryview(b"{}")))
                case _:
                    raise AssertionError(message)
        except NotOwner as error:
            op = message.op if isinstance(message, RequestMessage) else Op.PUSH
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
                    self.coordinator.in_sync(server.shard_number, backup, server.view.epoch)
                case TransferDone(part, since, giver):
                    self.coordinator.transfer_done(server.number, part, since, giver)
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
        view = self.coordinator.views[server.shard_number]
        if not server.is_primary or view.primary != server.number or not view.backups:
            return
        server.runs = False
        self.now += 2 * LEASE_S
        for other in self.servers:
            if other.runs:
                self.coordinator.heartbeat(other.number, self.now)
        self.coordinator.tick(self.now)
        if self.chance.random() < 0.5:
            for number in list(server.wires):
                self.cut(self.workers[number], server.shard_number)

    def see_view(self, server: Server) -> None:
        """Be what the coordinator says, as `replication.py` does."""
        view = self.coordinator.views[server.shard_number]
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
            to.install_snapshot(update.content)
            if isinstance(update, InstallSnapshot)
            else to.apply_replicated(update)
        )
        acknowledged = out[0]
        filled = isinstance(update, InstallSnapshot)
        part, clock = acknowledged.part, acknowledged.clock  # type: ignore[union-attr]
        self.say(server, server.shard.on_ack(backup, part, clock, filled))

    def place(self, server: Server) -> None:
        if server.runs:
            placement = server.placement = self.coordinator.placement
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
