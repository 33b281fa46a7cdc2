"""The coordinator's process, to which all servers and workers are connected. The decisions are made
in `coordinator.py`.

      server ── JOIN, HEARTBEAT ──> coordinator ── VIEW ───────> every server and worker
      worker ── LEAVE ────────────>     │       ── PLACEMENT ──> every server and worker
      user ──── ADD, REMOVE, LIST ─>    │
                                        └ each change is on the disk before anyone learns of it

If the coordinator is killed, it is started again on the same port and continues from its file;
nobody else stops for that. It ends when every worker has sent LEAVE."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any

from shoal.errors import ConnectionLost, WireError
from shoal.parameter_server.cluster_config import ClusterConfig
from shoal.parameter_server.codec import FIRST_SERVER, Op, unpack
from shoal.parameter_server.coordinator.coordinator import Coordinator, View
from shoal.parameter_server.transport.acceptor import Acceptor
from shoal.parameter_server.transport.connection import Connection, Header
from shoal.platform.files import atomic_write
from shoal.platform.processes import set_process_name

COORDINATOR = "coordinator"
"""Name of the coordinator as a listener. It is part of every handshake, so it must not change."""
_TICKS_PER_LEASE = 20


class CoordinatorServer:
    """Serves the coordinator of one job on a listening socket.

    Attributes:
        peers: connections by peer: a worker's number, or FIRST_SERVER and a server's.
        departed: workers that have sent LEAVE.
        statuses: server -> its last status report, for `shoal servers list`.
    """

    def __init__(self, config: ClusterConfig, listener: socket.socket) -> None:
        settings = config.settings
        self.config = config
        self.acceptor = Acceptor(listener, "the coordinator", config.transport, COORDINATOR)
        self.sizes = tuple(partition.size_bytes for partition in settings.parts)
        self.coordinator = Coordinator(
            config.owners, self.sizes, config.shards, settings.lease_s, config.replicas
        )
        if config.views_file.exists():
            # Another one has died before: go on with the views and the placement that it published,
            # for servers and workers refuse older ones.
            self.coordinator.from_json(config.views_file.read_text(), time.monotonic())
        self.lock = threading.Lock()
        self._worker_left = threading.Condition(self.lock)
        self.peers: dict[int, Connection] = {}
        self.departed: set[int] = set()
        self.statuses: dict[int, dict[str, Any]] = {}
        self._published_version = self.coordinator.placement.version

    def run(self) -> None:
        """Serve until every worker has sent LEAVE."""
        accepting = threading.Thread(
            target=self.acceptor.accept, args=(self._serve_connection,), daemon=True
        )
        accepting.start()
        workers = self.config.settings.workers
        tick_s = self.config.settings.lease_s / _TICKS_PER_LEASE
        with self._worker_left:
            while not self._worker_left.wait_for(lambda: len(self.departed) >= workers, tick_s):
                self._publish(self.coordinator.tick(time.monotonic()))
        # Outside the lock: a connection that closes waits for its threads, which may need it.
        peers = list(self.peers.values())
        for peer in peers:
            peer.post(Op.LEAVE)
        for peer in peers:
            peer.close(flush=True)

    # One connection

    def _serve_connection(self, peer: Connection, number: int) -> None:
        with self.lock:
            self.peers[number] = peer
            self._send_placement(peer)
            for view in self.coordinator.views.values():
                self._send_view(peer, view)
        try:
            while True:
                header, payload = peer.receive(lambda _: None)
                with self.lock:
                    self._on_message(number, peer, header, payload)
        except (WireError, ValueError) as error:
            if not isinstance(error, ConnectionLost):
                self.acceptor.refuse(error)
            with self.lock:
                # The peer may have connected again before its old connection failed.
                if self.peers.get(number) is peer:
                    del self.peers[number]
                    self.coordinator.disconnected(number - FIRST_SERVER)
        finally:
            peer.close()

    def _on_message(
        self, number: int, peer: Connection, header: Header, payload: memoryview
    ) -> None:
        """Handle a message. The lock is held."""
        server, now = number - FIRST_SERVER, time.monotonic()
        match header.op:
            case Op.JOIN:
                request = unpack(payload)
                host, port = request["address"]
                self.statuses[server] = request["facts"]
                self._publish(self.coordinator.join(server, request["shard"], (host, port), now))
            case Op.HEARTBEAT:
                if len(payload):
                    self.statuses[server] = unpack(payload)
                if self.coordinator.heartbeat(server, now):
                    peer.post(Op.HEARTBEAT, step=header.step)
                else:
                    peer.post(Op.REFUSED)
            case Op.TRANSFERRED:
                self._publish(
                    self.coordinator.transfer_done(
                        server, header.partition, header.epoch, header.worker
                    )
                )
            case Op.IN_SYNC:
                # The field `partition` carries the shard, and `worker` the backup.
                changed = self.coordinator.in_sync(header.partition, header.worker, header.epoch)
                self._publish(changed)
            case Op.LEAVE:
                self.departed.add(number)
                self._worker_left.notify_all()
                peer.post(Op.LEAVE)
            case Op.ADD:
                view = self.coordinator.add()
                self._publish([view])
                peer.post(Op.ADD, partition=view.shard)
            case Op.REMOVE:
                obstacle = self.coordinator.remove(header.partition)
                self._publish([])
                peer.post(Op.REMOVE, obstacle.encode())
            case Op.LIST:
                status = [
                    self._server_status(view, server)
                    for view in self.coordinator.views.values()
                    for server in view.members
                ]
                peer.post(Op.LIST, json.dumps(status).encode())

    # Answers to all

    def _publish(self, changed: list[View]) -> None:
        """Save the state, then send the changed views and the placement to every peer."""
        placement_changed = self.coordinator.placement.version != self._published_version
        if not changed and not placement_changed:
            return
        with atomic_write(self.config.views_file) as file:
            file.write(self.coordinator.to_json().encode())
        self._published_version = self.coordinator.placement.version
        for peer in self.peers.values():
            for view in changed:
                self._send_view(peer, view)
            if placement_changed:
                self._send_placement(peer)

    def _send_placement(self, peer: Connection) -> None:
        peer.post(Op.PLACEMENT, json.dumps(self.coordinator.placement.to_json()).encode())

    def _send_view(self, peer: Connection, view: View) -> None:
        payload = json.dumps(view.to_json()).encode()
        peer.post(Op.VIEW, payload, partition=view.shard, epoch=view.epoch)

    # The list for a user

    def _server_status(self, view: View, server: int) -> dict[str, Any]:
        """Return the entry of a server for `shoal servers list`."""
        placement, shard = self.coordinator.placement, view.shard
        owned = placement.owned_by(shard)
        state = "waits" if self.coordinator.is_filling(shard) else "stays"
        role = "backup" if server in view.backups else "joining"
        return {
            "shard": shard,
            "role": "primary" if server == view.primary else role,
            "server": server,
            "state": "leaving" if shard in placement.leaving else state,
            "address": list(view.addresses[server]),
            **self.statuses.get(server, {}),
            "moving": len(placement.arriving_at(shard)),
            "partitions": len(owned),
            "bytes": sum(self.sizes[partition] for partition in owned),
        }


def serve_coordinator(listener: socket.socket, config: ClusterConfig) -> None:
    """Run a coordinator in a process of its own, from its start to its end."""
    set_process_name("shoal coordinat")
    CoordinatorServer(config, listener).run()
