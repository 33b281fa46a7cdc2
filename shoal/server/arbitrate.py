"""The arbiter's body: a process that servers and workers are connected to. What it decides is in `arbiter.py`.

      server ── JOIN, BEAT ──> arbiter ── VIEW ──> every server and worker
      worker ── BYE ─────────>    │   ── PLACEMENT ──> likewise
      user ──── ADD, REMOVE ─>    │
                                  └ every change is on the disk before anyone is told

A killed arbiter is started again on the same port and goes on from its file; nobody else stops for it. It ends when
every worker has said BYE.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import ConnectionLost, WireError
from shoal.files import atomic_write
from shoal.server.arbiter import Arbiter, View
from shoal.server.channel import Channel
from shoal.server.door import Door
from shoal.server.frame import Header
from shoal.server.messages import FIRST_SERVER, Op, unpack
from shoal.server.peer import Peer
from shoal.server.said import Refused
from shoal.server.shard_settings import ShardSettings
from shoal.server.transport_settings import Transport

ARBITER = "arbiter"
_OF_SERVERS = (Op.JOIN, Op.BEAT, Op.HELD, Op.IN_SYNC)
_OF_USERS = (Op.ADD, Op.REMOVE, Op.LIST)


@dataclass(frozen=True)
class Court:
    """All that an arbiter is told when it starts."""

    transport: Transport
    file: Path  # of what it decides
    settings: ShardSettings
    owners: tuple[int, ...]  # of each part
    shards: int
    replicas: int = 1


class Arbitration:
    """Serves one job's arbiter on a listening socket."""

    def __init__(self, court: Court, listener: socket.socket) -> None:
        self.court = court
        self.door = Door(listener, "the arbiter", court.transport.for_arbiter(), ARBITER)
        self.sizes = tuple(part.size_bytes for part in court.settings.parts)
        lease_s = court.settings.lease_s
        self.arbiter = Arbiter(court.owners, self.sizes, court.shards, lease_s, court.replicas)
        if court.file.exists():
            self.arbiter.restore(court.file.read_text(), time.monotonic())
        self.lock = threading.Lock()
        self.left = threading.Condition(self.lock)
        self.peers: dict[int, Peer] = {}
        self.gone: set[int] = set()
        self.facts: dict[int, dict[str, Any]] = {}
        self.told = self.arbiter.placement.version

    def run(self) -> None:
        """Until every worker has said that it will not come back."""
        threading.Thread(target=self.door.admit, args=(self._attend,), daemon=True).start()
        with self.left:
            workers, tick_s = self.court.settings.workers, self.court.settings.lease_s / 20
            while not self.left.wait_for(lambda: len(self.gone) >= workers, tick_s):
                self._publish(self.arbiter.tick(time.monotonic()))
        peers = list(self.peers.values())
        for peer in peers:
            peer.post(Op.BYE)
        for peer in peers:
            peer.close(flush=True)

    def _attend(self, channel: Channel, number: int) -> None:
        peer = Peer(channel, f"member {number}")
        with self.lock:
            self.peers[number] = peer
            self._tell_placement(peer)
            for view in self.arbiter.views.values():
                self._tell(peer, view)
        try:
            while True:
                header, payload = peer.receive(lambda _: None)
                with self.lock:
                    self._take(number, peer, header, payload)
        except (Refused, WireError) as error:
            if not isinstance(error, ConnectionLost):
                self.door.refuse(error)
            with self.lock:
                if self.peers.get(number) is peer:
                    del self.peers[number]
                    self.arbiter.hang_up(number - FIRST_SERVER)
        finally:
            peer.close()

    def _take(self, number: int, peer: Peer, header: Header, payload: memoryview) -> None:
        if header.op in _OF_SERVERS:
            self._take_from_server(number - FIRST_SERVER, peer, header, payload)
        elif header.op in _OF_USERS:
            self._take_from_user(peer, header)
        elif header.op == Op.BYE:
            self.gone.add(number)
            self.left.notify_all()
            peer.post(Op.BYE)
        elif header.op == Op.SPEEDS:
            self.arbiter.measured({int(shard): speed for shard, speed in unpack(payload)})
            self._publish([])

    def _take_from_server(self, server: int, peer: Peer, header: Header, payload: memoryview) -> None:
        now = time.monotonic()
        match header.op:
            case Op.JOIN:
                found = unpack(payload)
                host, port = found["address"]
                self.facts[server] = found["facts"]
                self._publish(self.arbiter.join(server, found["shard"], (host, port), now))
            case Op.BEAT:
                if len(payload):
                    self.facts[server] = unpack(payload)
                if self.arbiter.beat(server, now):
                    peer.post(Op.BEAT, step=header.step)
                else:
                    peer.post(Op.REFUSED)
            case Op.HELD:
                self._publish(self.arbiter.held(server, header.part, header.epoch, header.worker))
            case Op.IN_SYNC:
                self._publish(self.arbiter.in_sync(header.part, header.worker, header.epoch))

    def _take_from_user(self, peer: Peer, header: Header) -> None:
        match header.op:
            case Op.ADD:
                view = self.arbiter.add()
                self._publish([view])
                peer.post(Op.ADD, part=view.shard)
            case Op.REMOVE:
                why_not = self.arbiter.remove(header.part)
                self._publish([])
                peer.post(Op.REMOVE, why_not.encode())
            case Op.LIST:
                peer.post(Op.LIST, json.dumps(self._listed()).encode())

    def _publish(self, changed: list[View]) -> None:
        moved = self.arbiter.placement.version != self.told
        if not changed and not moved:
            return
        with atomic_write(self.court.file) as file:
            file.write(self.arbiter.dump().encode())
        self.told = self.arbiter.placement.version
        for peer in self.peers.values():
            for view in changed:
                self._tell(peer, view)
            if moved:
                self._tell_placement(peer)

    def _listed(self) -> list[dict[str, Any]]:
        """A line for each server."""
        placement = self.arbiter.placement
        return [
            {
                "shard": view.shard,
                "role": "primary" if server == view.primary else "backup" if server in view.backups else "joining",
                "server": server,
                "state": self._state(view.shard),
                "address": list(view.addresses[server]),
                **self.facts.get(server, {}),
                "moving": len(placement.coming_to(view.shard)),
                "parts": len(placement.owned_by(view.shard)),
                "bytes": sum(self.sizes[part] for part in placement.owned_by(view.shard)),
            }
            for view in self.arbiter.views.values()
            for server in view.members
        ]

    def _state(self, shard: int) -> str:
        if shard in self.arbiter.placement.leaving:
            return "leaving"
        return "waits" if self.arbiter.waits(shard) else "stays"

    def _tell_placement(self, peer: Peer) -> None:
        peer.post(Op.PLACEMENT, json.dumps(self.arbiter.placement.to_json()).encode())

    def _tell(self, peer: Peer, view: View) -> None:
        peer.post(Op.VIEW, json.dumps(view.to_json()).encode(), part=view.shard, epoch=view.epoch)


def arbitrate(listener: socket.socket, court: Court) -> None:
    """An arbiter's whole life, in a process of its own."""
    Arbitration(court, listener).run()
