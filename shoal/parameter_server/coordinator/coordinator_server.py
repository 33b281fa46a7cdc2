"""The arbiter's body: a process that servers and workers are connected to. What it decides is in
`arbiter.py`.

      server ── JOIN, BEAT ──> arbiter ── VIEW ──> every server and worker
      worker ── BYE ─────────>    │   ── PLACEMENT ──> likewise
      user ──── ADD, REMOVE ─>    │
                                  └ every change is on the disk before anyone is told

A killed arbiter is started again on the same port and goes on from its file; nobody else stops for
it. It ends when every worker has said BYE."""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import ConnectionLost, WireError
from shoal.parameter_server.codec import FIRST_SERVER, Op, unpack
from shoal.parameter_server.coordinator.coordinator import Coordinator, View
from shoal.parameter_server.events import ProtocolViolation
from shoal.parameter_server.shard_settings import ShardSettings
from shoal.parameter_server.transport.acceptor import Acceptor
from shoal.parameter_server.transport.connection import QueuedConnection
from shoal.parameter_server.transport.frame import Header
from shoal.parameter_server.transport.secure_channel import SecureChannel
from shoal.parameter_server.transport.settings import Transport
from shoal.platform.files import atomic_write

ARBITER = "arbiter"
_OF_SERVERS = (Op.JOIN, Op.HEARTBEAT, Op.TRANSFERRED, Op.IN_SYNC)
_OF_USERS = (Op.ADD, Op.REMOVE, Op.LIST)


@dataclass(frozen=True)
class CoordinatorConfig:
    """All that an arbiter is told when it starts."""

    transport: Transport
    file: Path  # of what it decides
    settings: ShardSettings
    owners: tuple[int, ...]  # of each part
    shards: int
    replicas: int = 1


class CoordinatorServer:
    """Serves one job's arbiter on a listening socket."""

    def __init__(self, court: CoordinatorConfig, listener: socket.socket) -> None:
        self.court = court
        self.door = Acceptor(listener, "the arbiter", court.transport.for_arbiter(), ARBITER)
        self.sizes = tuple(part.size_bytes for part in court.settings.parts)
        lease_s = court.settings.lease_s
        self.arbiter = Coordinator(court.owners, self.sizes, court.shards, lease_s, court.replicas)
        if court.file.exists():
            self.arbiter.from_json(court.file.read_text(), time.monotonic())
        self.lock = threading.Lock()
        self.left = threading.Condition(self.lock)
        self.peers: dict[int, QueuedConnection] = {}
        self.gone: set[int] = set()
        self.facts: dict[int, dict[str, Any]] = {}
        self.told = self.arbiter.placement.version

    def run(self) -> None:
        """Until every worker has said that it will not come back."""
        threading.Thread(
            target=self.door.accept, args=(self._serve_connection,), daemon=True
        ).start()
        with self.left:
            workers, tick_s = self.court.settings.workers, self.court.settings.lease_s / 20
            while not self.left.wait_for(lambda: len(self.gone) >= workers, tick_s):
                self._publish(self.arbiter.tick(time.monotonic()))
        peers = list(self.peers.values())
        for peer in peers:
            peer.post(Op.LEAVE)
        for peer in peers:
            peer.close(flush=True)

    def _serve_connection(self, channel: SecureChannel, number: int) -> None:
        peer = QueuedConnection(channel, f"member {number}")
        with self.lock:
            self.peers[number] = peer
            self._tell_placement(peer)
            for view in self.arbiter.views.values():
                self._send_view(peer, view)
        try:
            while True:
                header, payload = peer.receive(lambda _: None)
                with self.lock:
                    self._take(number, peer, header, payload)
        except (ProtocolViolation, WireError) as error:
            if not isinstance(error, ConnectionLost):
                self.door.refuse(error)
            with self.lock:
                if self.peers.get(number) is peer:
                    del self.peers[number]
                    self.arbiter.disconnected(number - FIRST_SERVER)
        finally:
            peer.close()

    def _take(
        self, number: int, peer: QueuedConnection, header: Header, payload: memoryview
    ) -> None:
        if header.op in _OF_SERVERS:
            self._take_from_server(number - FIRST_SERVER, peer, header, payload)
        elif header.op in _OF_USERS:
            self._take_from_user(peer, header)
        elif header.op == Op.LEAVE:
            self.gone.add(number)
            self.left.notify_all()
            peer.post(Op.LEAVE)
        elif header.op == Op.BANDWIDTHS:
            self.arbiter.set_bandwidths({int(shard): speed for shard, speed in unpack(payload)})
            self._publish([])

    def _take_from_server(
        self, server: int, peer: QueuedConnection, header: Header, payload: memoryview
    ) -> None:
        now = time.monotonic()
        match header.op:
            case Op.JOIN:
                found = unpack(payload)
                host, port = found["address"]
                self.facts[server] = found["facts"]
                self._publish(self.arbiter.join(server, found["shard"], (host, port), now))
            case Op.HEARTBEAT:
                if len(payload):
                    self.facts[server] = unpack(payload)
                if self.arbiter.heartbeat(server, now):
                    peer.post(Op.HEARTBEAT, step=header.step)
                else:
                    peer.post(Op.REFUSED)
            case Op.TRANSFERRED:
                self._publish(
                    self.arbiter.transfer_done(
                        server, header.partition, header.epoch, header.worker
                    )
                )
            case Op.IN_SYNC:
                self._publish(self.arbiter.in_sync(header.partition, header.worker, header.epoch))

    def _take_from_user(self, peer: QueuedConnection, header: Header) -> None:
        match header.op:
            case Op.ADD:
                view = self.arbiter.add()
                self._publish([view])
                peer.post(Op.ADD, partition=view.shard)
            case Op.REMOVE:
                why_not = self.arbiter.remove(header.partition)
                self._publish([])
                peer.post(Op.REMOVE, why_not.encode())
            case Op.LIST:
                peer.post(Op.LIST, json.dumps(self._status()).encode())

    def _publish(self, changed: list[View]) -> None:
        moved = self.arbiter.placement.version != self.told
        if not changed and not moved:
            return
        with atomic_write(self.court.file) as file:
            file.write(self.arbiter.to_json().encode())
        self.told = self.arbiter.placement.version
        for peer in self.peers.values():
            for view in changed:
                self._send_view(peer, view)
            if moved:
                self._tell_placement(peer)

    def _status(self) -> list[dict[str, Any]]:
        """A line for each server."""
        placement = self.arbiter.placement
        return [
            {
                "shard": view.shard,
                "role": "primary"
                if server == view.primary
                else "backup"
                if server in view.backups
                else "joining",
                "server": server,
                "state": self._state(view.shard),
                "address": list(view.addresses[server]),
                **self.facts.get(server, {}),
                "moving": len(placement.arriving_at(view.shard)),
                "parts": len(placement.owned_by(view.shard)),
                "bytes": sum(self.sizes[part] for part in placement.owned_by(view.shard)),
            }
            for view in self.arbiter.views.values()
            for server in view.members
        ]

    def _state(self, shard: int) -> str:
        if shard in self.arbiter.placement.leaving:
            return "leaving"
        return "waits" if self.arbiter.is_filling(shard) else "stays"

    def _tell_placement(self, peer: QueuedConnection) -> None:
        peer.post(Op.PLACEMENT, json.dumps(self.arbiter.placement.to_json()).encode())

    def _send_view(self, peer: QueuedConnection, view: View) -> None:
        peer.post(
            Op.VIEW, json.dumps(view.to_json()).encode(), partition=view.shard, epoch=view.epoch
        )


def arbitrate(listener: socket.socket, court: CoordinatorConfig) -> None:
    """An arbiter's whole life, in a process of its own."""
    CoordinatorServer(court, listener).run()
