"""The process of an aggregator: it sums the gradients of one host's workers, and one pull serves
all of them.

   host 0    worker 0 ┐ shared                                            host 1
             worker 1 ┴ memory ── aggregator ══ push, pull ══ server      aggregator ── worker 2
                                     sums                        ╚════════════┘ └────── worker 3

So the bytes between hosts do not grow with the workers of a host. Sums are made host by host: they
are reproducible, but their rounding differs from that without aggregators.

It runs the I/O of an `Aggregator`: a `ServerNode` for the workers and a `SocketNetwork` to the
servers, under one lock.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from shoal.parameter_server.codec import BLOCKS, Op
from shoal.parameter_server.coordinator.coordinator import Address
from shoal.parameter_server.events import Outgoing, ProtocolViolation
from shoal.parameter_server.node.node_server import ServerConfig, ServerNode, configure_process
from shoal.parameter_server.node.shared_values import read_offsets
from shoal.parameter_server.partitioning import offsets
from shoal.parameter_server.transport.connection import QueuedConnection
from shoal.parameter_server.transport.frame import Header
from shoal.parameter_server.transport.settings import Transport
from shoal.parameter_server.worker.aggregator import Aggregator
from shoal.parameter_server.worker.session import WorkerSession
from shoal.parameter_server.worker.shard_connection import WorkerMemory
from shoal.parameter_server.worker.socket_network import SocketNetwork
from shoal.parameter_server.worker.worker_messages import (
    ConnectShard,
    DisconnectShard,
    QueryAnswered,
    RetryLater,
    SessionAction,
    SessionEvent,
    ShardFailed,
    ToShard,
    ValuesArrived,
)
from shoal.shm_backend.segment import SharedSegment


@dataclass(frozen=True)
class UpstreamConfig:
    """The servers behind an aggregator.

    Args:
        arbiter: address of the servers' coordinator.
        transport: settings of their job.
        worker: the aggregator's id among all aggregators.
        loads: True for the one aggregator that loads the initial values into the servers.
        shares: True to let servers of this machine read the sums in its memory.
    """

    arbiter: Address
    transport: Transport
    worker: int
    loads: bool
    shares: bool


@dataclass
class FiguresRequest:
    """A request for the servers' figures, of one or more workers.

    Attributes:
        peers: connections of the workers, each with the shard number of its request.
        found: shard -> its answer.
        missing: shards that have not answered.
    """

    peers: list[tuple[QueuedConnection, int]] = field(default_factory=list)
    found: dict[int, Any] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)


class AggregatorServer:
    """Serve the workers of one host.

    Attributes: session: the session with the servers.
    """

    def __init__(self, plan: ServerConfig, behind: UpstreamConfig, listener: socket.socket) -> None:
        self.server = ServerNode(plan, listener, self._on_message)
        parts = plan.settings.parts
        offset_of, size_bytes = offsets(parts)
        sums = SharedSegment(size_bytes)
        sums_at = [offset_of[part.number] for part in parts]
        self.session = WorkerSession(len(parts))
        self.aggregator = Aggregator(
            self.server.shard,
            self.session,
            lambda index: sums.tensor(sums_at[index], parts[index].length, parts[index].dtype),
            behind.loads,
        )
        memory = WorkerMemory(
            [self.server.shared_values.values(part) for part in parts],
            read_offsets(parts, behind.worker, 0),
            sums,
            sums_at if behind.shares else (),
        )
        transport = behind.transport.for_parts(parts)
        self.network = SocketNetwork(behind.worker, behind.arbiter, memory, transport)
        self._state_peers: dict[int, list[QueuedConnection]] = {}
        self._figures: FiguresRequest | None = None

    @property
    def lock(self) -> threading.Lock:
        """Return the server's lock, which guards the session, too."""
        return self.server.lock

    def run(self) -> None:
        """Serve until the workers' coordinator has released this server."""
        self.network.start(self)
        self.server.run()
        self.network.close(5.0)

    def handle(self, event: SessionEvent) -> None:
        """Handle an event of the session. The lock is held. Raises ServerLost."""
        match event:
            case ShardFailed(error):
                raise error
            case QueryAnswered(Op.STATE, part, payload) if payload is not None:
                for peer in self._state_peers.pop(part):
                    peer.post(Op.STATE, bytes(payload), partition=part)
            case QueryAnswered(Op.STATS, shard, payload):
                self._collect_figures(shard, payload)
            case _:
                self.server.send(self.aggregator.receive(event))

    def _on_message(
        self, worker: int, peer: QueuedConnection, header: Header, payload: memoryview, about: bytes
    ) -> Iterable[Outgoing]:
        """Handle a worker's message; forward queries that only the servers can answer."""
        part = header.partition
        step = header.step
        aggregator = self.aggregator
        match header.op:
            case Op.PUSH:
                gradient, present = self.server.requests.gradient(worker, header, payload, about)
                sparse = bool(header.flags & BLOCKS)
                return self._forward(aggregator.push(worker, step, part, gradient, present, sparse))
            case Op.STEP:
                return self._forward(aggregator.request_step(worker, step, bytes(payload)))
            case Op.NORM | Op.GRADIENT:
                return self._forward(aggregator.query(worker, step, Op(header.op), part))
            case Op.LOAD:
                return self._forward(aggregator.load(worker, part, bytes(payload), step))
            case Op.STATE:
                self._request_state(peer, part)
            case Op.STATS:
                self._request_figures(peer, part)
            case Op.PULL | Op.STOP:
                raise ProtocolViolation(
                    f"message {header.op} to a relay, which takes synchronous steps only"
                )
            case _:
                return self.server.requests.handle(worker, peer, header, payload, about)
        return []

    def _forward(self, actions: Iterable[Outgoing | SessionAction]) -> list[Outgoing]:
        """Carry out the actions for the servers, and return the messages for the workers."""
        out: list[Outgoing] = []
        for action in actions:
            match action:
                case ToShard() | ConnectShard() | DisconnectShard() | RetryLater():
                    self.network.carry_out([action])
                case ValuesArrived() | QueryAnswered() | ShardFailed():
                    self.handle(action)
                case _:
                    out.append(action)
        return out

    def _request_state(self, peer: QueuedConnection, part: int) -> None:
        self._state_peers.setdefault(part, []).append(peer)
        if len(self._state_peers[part]) == 1:
            self.network.carry_out(self.session.query(Op.STATE, {part: b""}))

    def _request_figures(self, peer: QueuedConnection, about: int) -> None:
        if self._figures is not None:
            self._figures.peers.append((peer, about))
            return
        shards = self.session.owners()
        self._figures = FiguresRequest([(peer, about)], missing=set(shards))
        for shard in shards:
            self.network.carry_out(self.session.query_shard(shard, Op.STATS))

    def _collect_figures(self, shard: int, payload: memoryview | None) -> None:
        """Add a shard's answer. After the last one, answer all workers."""
        request = self._figures
        assert request is not None
        request.missing.discard(shard)
        if payload is not None:
            request.found[shard] = json.loads(bytes(payload))
        if request.missing:
            return
        self._figures = None
        behind = [request.found[answered] for answered in sorted(request.found)]
        figures = json.dumps({**self.server.figures(), "behind": behind}).encode()
        for peer, about in request.peers:
            peer.post(Op.STATS, figures, partition=about)


def relay(listener: socket.socket, plan: ServerConfig, behind: UpstreamConfig) -> None:
    """Run an aggregator in this process until it ends."""
    configure_process()
    AggregatorServer(plan, behind, listener).run()
