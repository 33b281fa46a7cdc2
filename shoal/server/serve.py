"""A server's body: sockets and threads around a `Shard`.

      worker ──┐ a thread reads a connection, straight into the memory where the gradient is summed
      worker ──┼──> lock ── Shard ──> a thread for each connection sends what is to be said
      worker ──┘

The lock is held while the shard thinks, never while anything is received or sent.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.errors import WireError
from shoal.server.channel import Channel, is_loopback
from shoal.server.frame import Header
from shoal.server.handshake import accept
from shoal.server.layout import Part
from shoal.server.messages import Op, pack_part, unpack_order, unpack_part, view
from shoal.server.peer import Peer
from shoal.server.recipe import Recipe
from shoal.server.shard import Gradient, Norm, Out, Refused, Shard, Value

SMALL_BYTES = 2**16
"""The longest message that is no part."""
log = logging.getLogger("shoal.server")


@dataclass(frozen=True)
class Plan:
    """All that a server is told when it starts."""

    shard: int
    parts: tuple[Part, ...]
    recipe: Recipe
    workers: int
    staleness: int | None
    job: str
    key: bytes


class Server:
    """Serves one shard on a listening socket, until its last worker has hung up."""

    def __init__(self, plan: Plan, listener: socket.socket) -> None:
        self.plan, self.listener = plan, listener
        self.shard = Shard(plan.parts, plan.recipe, range(plan.workers), plan.staleness)
        self.lock = threading.Lock()
        self.peers: dict[int, Peer] = {}
        self.buffers: dict[tuple[int, int], Tensor] = {}
        self.refused = 0
        self.stop_at = 0
        self.received_bytes = 0
        most = max((part.size_bytes for part in plan.parts), default=0)
        self.limit_bytes = 8 * most + SMALL_BYTES  # a part's state holds a few times its numbers

    def run(self) -> None:
        """Accept connections until the listener is closed."""
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._attend, args=(connection,), daemon=True).start()

    def close(self) -> None:
        """Hang up on everyone."""
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for peer in list(self.peers.values()):
            peer.close()

    def _attend(self, connection: socket.socket) -> None:
        """One connection, from its handshake to its end."""
        try:
            session, worker = accept(connection, self.plan.key, self.plan.job)
        except WireError as error:
            self._count_refusal(error)
            connection.close()
            return
        remote = not is_loopback(connection)
        peer = Peer(
            Channel(connection, session, authenticate_payload=remote, limit_bytes=self.limit_bytes), f"worker {worker}"
        )
        with self.lock:
            before, self.peers[worker] = self.peers.get(worker), peer
        if before is not None:
            before.close()
        try:
            self._converse(worker, peer)
        except (WireError, Refused) as error:
            if isinstance(error, Refused):
                self._count_refusal(error)
                peer.post(Op.REFUSED, str(error).encode()[:SMALL_BYTES])
        finally:
            peer.close(flush=True)
            with self.lock:
                if self.peers.get(worker) is peer:
                    del self.peers[worker]
                if not self.peers:  # the last worker has hung up
                    self.close()

    def _converse(self, worker: int, peer: Peer) -> None:
        present: dict[int, bytes] = {}
        while True:
            header, payload = peer.receive(lambda header: self._place(worker, header))
            if header.op == Op.PRESENT:
                present[header.part] = bytes(payload)
                continue
            with self.lock:
                self.received_bytes += header.length
                out = self._take(worker, peer, header, payload, present)
                self._send(out)

    def _place(self, worker: int, header: Header) -> memoryview | None:
        """Where a payload goes: a gradient to the memory that it is summed in."""
        if header.op != Op.PUSH:
            return None
        held = self.shard.held.get(header.part)
        if held is None or header.length != held.part.size_bytes:
            raise Refused(f"a gradient of {header.length} bytes for part {header.part}")
        buffer = self.buffers.get((worker, header.part))
        if buffer is None:
            buffer = self.buffers[worker, header.part] = torch.empty_like(held.values)
        return view(buffer)

    def _take(
        self, worker: int, peer: Peer, header: Header, payload: memoryview, present: dict[int, bytes]
    ) -> Iterable[Out]:
        shard, step, part = self.shard, header.step, header.part
        match header.op:
            case Op.PUSH:
                there = present.pop(part, b"\1" * len(shard.held[part].part.segments))
                return shard.push(worker, step, part, self.buffers[worker, part], there)
            case Op.ORDER:
                return shard.order(worker, step, unpack_order(payload))
            case Op.NORM:
                return shard.ask(worker, step, None)
            case Op.GRADIENT:
                return shard.ask(worker, step, part)
            case Op.PULL:
                return shard.pull(worker, part)
            case Op.STOP:
                newest = max((order_step for order_step, _ in shard.orders.values()), default=0)
                self.stop_at = self.stop_at or newest + 3  # nobody has got that far, so everyone hears of it in time
            case Op.LOAD:
                values, state, _ = unpack_part(payload)
                shard.load(part, values, list(state), step)
                peer.post(Op.LOAD, part=part)
            case Op.STATE:
                held = shard.held_part(part)
                state_bytes = pack_part(held.values, list(held.state()), shard.done[part])
                peer.post(Op.STATE, state_bytes, part=part, step=held.clock)
            case Op.FIGURES:
                peer.post(Op.FIGURES, json.dumps(self._figures()).encode())
            case _:
                raise Refused(f"message {header.op}, which is not known")
        return []

    def _send(self, out: Iterable[Out]) -> None:
        for message in out:
            match message:
                case Value(worker, part, clock, oldest, numbers):
                    self._to(worker, Op.VALUE, numbers, part=part, step=clock, epoch=oldest, worker=self.stop_at)
                case Norm(worker, step, squared):
                    self._to(worker, Op.NORM, squared.hex().encode(), step=step)
                case Gradient(worker, part, numbers, present):
                    self._to(worker, Op.GRADIENT, present + bytes(view(numbers)), part=part)

    def _to(self, number: int, op: Op, payload: Any, **fields: int) -> None:
        peer = self.peers.get(number)
        if peer is not None:  # one that is gone asks again when it is back
            peer.post(op, payload, **fields)

    def _figures(self) -> dict[str, Any]:
        held = self.shard.held.values()
        return {
            "shard": self.plan.shard,
            "parts": len(held),
            "bytes": sum(part.part.size_bytes for part in held),
            "clock": min((part.clock for part in held), default=0),
            "received_bytes": self.received_bytes,
            "refused": self.refused,
            "staleness": dict(self.shard.seen),
        }

    def _count_refusal(self, error: Exception) -> None:
        with self.lock:
            self.refused += 1
        log.warning("server %d refused a connection: %s", self.plan.shard, error)


def serve(listener: socket.socket, plan: Plan) -> None:
    """A server's whole life, in a process of its own."""
    torch.set_num_threads(1)
    Server(plan, listener).run()
