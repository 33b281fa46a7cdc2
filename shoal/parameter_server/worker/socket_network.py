"""One worker's connections: one to every shard, and one to the coordinator.

    client ── request ──> lock ── WorkerSession ── actions ──> SocketNetwork
                           │                               ├ ShardConnection ──> shard 0
             thread of a ──┘<── one message after another ─┤
             connection                                    └ ShardConnection ──> shard 1

One lock guards the session and the messages that it sends. No thread blocks while it holds the
lock."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping

from shoal.errors import ServerLost
from shoal.parameter_server.codec import Op
from shoal.parameter_server.coordinator.coordinator import Address, View
from shoal.parameter_server.coordinator.placement import Placement
from shoal.parameter_server.coordinator.watch import RETRY_S, ClusterWatcher
from shoal.parameter_server.transport.settings import UNIX, Transport
from shoal.parameter_server.worker.shard_connection import RECOVER_S, ShardConnection, WorkerMemory
from shoal.parameter_server.worker.worker_messages import (
    ConnectShard,
    DisconnectShard,
    RetryLater,
    SessionAction,
    ToShard,
)
from shoal.parameter_server.worker.worker_network import SessionOwner

UNEVEN = 2.0
"""Ratio below which bandwidths of shards count as equal: one measurement is not more exact."""


class SocketNetwork:
    """One worker's connections to all shards.

    Args:
        worker: its id among the workers of the same servers.
        arbiter: the address of the coordinator.
        transport: settings of the job, with a size limit for the partitions.
    """

    owner: SessionOwner

    def __init__(
        self, worker: int, arbiter: Address, memory: WorkerMemory, transport: Transport
    ) -> None:
        self.worker = worker
        self.memory = memory
        self.transport = transport
        self._arbiter = arbiter
        self._connections: dict[int, ShardConnection] = {}
        self._is_placed = threading.Event()
        self._has_left = threading.Event()
        self.views = ClusterWatcher(
            worker,
            arbiter,
            transport,
            changed=self._on_view,
            placed=self._on_placement,
            answered=lambda _: self._has_left.set(),
        )

    def start(self, owner: SessionOwner) -> None:
        self.owner = owner
        self.views.begin()
        if not self._is_placed.wait(RECOVER_S):
            host, port = self._arbiter
            raise ServerLost(f"the arbiter at {host}:{port} has said nothing for {RECOVER_S:g} s.")

    def carry_out(self, actions: Iterable[SessionAction]) -> None:
        for action in actions:
            match action:
                case ToShard(shard, message):
                    self._connections[shard].send(message)
                case ConnectShard(shard):
                    self._connections[shard] = self._new_connection(shard)
                case DisconnectShard(shard):
                    self._connections[shard].hang_up()
                case RetryLater(partition, op):
                    timer = threading.Timer(RETRY_S, self._resend, (partition, op))
                    timer.daemon = True
                    timer.start()
                case _:
                    self.owner.handle(action)

    def report_speeds(self, bytes_per_s: Mapping[int, float]) -> None:
        """Report to the coordinator, if the speeds differ enough to place partitions by them."""
        if self._arbiter[0] == UNIX:
            return  # servers of one machine do not differ
        if bytes_per_s and max(bytes_per_s.values()) > UNEVEN * min(bytes_per_s.values()):
            self.views.post(Op.BANDWIDTHS, json.dumps([*bytes_per_s.items()]).encode())

    def close(self, limit_s: float) -> None:
        """Disconnect for good: sign off at the coordinator and wait for its answer."""
        self.views.post(Op.LEAVE)
        self._has_left.wait(limit_s)
        self.views.close()
        for connection in self._connections.values():
            connection.close()

    def _new_connection(self, shard: int) -> ShardConnection:
        return ShardConnection(
            shard, self.worker, self.owner, self, self.memory, self.transport, self.views
        )

    def _on_view(self, view: View) -> None:
        with self.owner.lock:
            self.carry_out(self.owner.session.view_changed(view))

    def _on_placement(self, placement: Placement) -> None:
        with self.owner.lock:
            self.carry_out(self.owner.session.placement_changed(placement))
        self._is_placed.set()

    def _resend(self, partition: int, op: Op) -> None:
        with self.owner.lock:
            self.carry_out(self.owner.session.resend(partition, op))
