"""A worker's side of its servers: parts go out as they are ready and come back straight into the parameters.

backward ── push part 7 ── push part 6 ── ...          a thread for each server sends
step     ── order
forward     waits for part 0 ── part 1 ── ...          a thread for each server receives
"""

from __future__ import annotations

import json
import queue
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ServerLost, WireError
from shoal.server.channel import Channel, is_loopback
from shoal.server.frame import Header
from shoal.server.handshake import connect
from shoal.server.layout import Part
from shoal.server.messages import Op, pack_order, pack_part, unpack_part, view
from shoal.server.peer import Peer
from shoal.server.shard import Order

Address = tuple[str, int]
ANSWER_S = 60.0
"""How long a server may think about a question."""


class Client:
    """One worker's connections to all servers. Use it from one thread at a time.

    Args:
        worker: this worker's number.
        parts: of the whole model.
        owners: the server of each part.
        addresses: of the servers.
        values: of each part, flat CPU tensors: where its numbers are written as they come.
        staleness: which no answer may exceed; None for any.

    Attributes:
        step: steps that were ordered so far.
        stop_at: how many steps all workers take before they stop, once one has asked for it; 0 before.
    """

    def __init__(
        self,
        worker: int,
        parts: Sequence[Part],
        owners: Sequence[int],
        addresses: Sequence[Address],
        values: Sequence[Tensor],
        *,
        key: bytes,
        job: str,
        staleness: int | None = 0,
    ) -> None:
        self.worker, self.parts, self.owners, self.values = worker, parts, owners, values
        self.staleness, self.step, self.stop_at = staleness, 0, 0
        self._news = threading.Condition()
        self._arrived = [0] * len(parts)
        self._failure: ServerLost | None = None
        self._closed = False
        most = max((part.size_bytes for part in parts), default=0)
        self._limit_bytes = 8 * most + 2**20
        self._answers: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in addresses]
        self._peers = [self._meet(number, address, key, job) for number, address in enumerate(addresses)]

    def push(self, part: int, gradient: Tensor, present: bytes) -> None:
        """Send a part's gradient of the step that is under way; it must not change until `wait` has returned."""
        self.wait([part])
        peer = self._peers[self.owners[part]]
        if 0 in present:
            peer.post(Op.PRESENT, present, part=part)
        peer.post(Op.PUSH, gradient, part=part, step=self.step)

    def order(self, order: Order) -> None:
        """Have the servers take the step, now that every part was pushed."""
        self.wait(range(len(self.parts)))
        payload = pack_order(order)
        step, self.step = self.step, self.step + 1
        for peer in self._peers:
            peer.post(Op.ORDER, payload, step=step)

    def wait(self, parts: Iterable[int]) -> None:
        """Until the values of the last step are here. Raises ServerLost."""
        with self._news:
            for part in parts:
                while self._arrived[part] < self.step:
                    if self._failure is not None:
                        raise self._failure
                    self._news.wait()

    def ask_to_stop(self) -> None:
        """Have all workers stop after the same step, which none of them has reached."""
        if not self.stop_at:
            self._peers[0].post(Op.STOP)

    def pull(self) -> None:
        """Wait for the newest values of all parts. Every worker must have waited for its own before."""
        with self._news:
            self._arrived = [-1] * len(self.parts)
        for part in self.parts:
            self._peers[self.owners[part.number]].post(Op.PULL, part=part.number)
        self.wait(range(len(self.parts)))

    def squared_norm(self) -> float:
        """Of all gradients of the step that is under way, over all workers. Every worker must have pushed or will."""
        for peer in self._peers:
            peer.post(Op.NORM, step=self.step)
        return sum(
            float.fromhex(bytes(self._answer(server, Op.NORM)[1]).decode()) for server in range(len(self._peers))
        )

    def gradient(self, part: int) -> tuple[Tensor, bytes]:
        """A part's gradient, summed over all workers, and which of its segments have one."""
        server = self.owners[part]
        self._peers[server].post(Op.GRADIENT, part=part, step=self.step)
        _, payload = self._answer(server, Op.GRADIENT)
        segments = len(self.parts[part].segments)
        numbers = torch.frombuffer(bytearray(payload[segments:]), dtype=self.parts[part].dtype)
        return numbers, bytes(payload[:segments])

    def load(self, states: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Have the servers begin at this worker's `values`, with these optimizer states, at this worker's step."""
        for part, state in zip(self.parts, states, strict=True):
            payload = pack_part(self.values[part.number], list(state), {})
            self._peers[self.owners[part.number]].post(Op.LOAD, payload, part=part.number, step=self.step)
        for part in self.parts:
            self._answer(self.owners[part.number], Op.LOAD)
        self.begin()

    def begin(self) -> None:
        """Take the values that are here for those of the servers."""
        with self._news:
            self._arrived = [self.step] * len(self.parts)

    def state(self, part: int) -> list[dict[str, Any]]:
        """The optimizer's state of each segment of a part."""
        server = self.owners[part]
        self._peers[server].post(Op.STATE, part=part)
        return unpack_part(self._answer(server, Op.STATE)[1])[1]

    def figures(self) -> list[dict[str, Any]]:
        """What each server tells of itself."""
        for peer in self._peers:
            peer.post(Op.FIGURES)
        return [json.loads(bytes(self._answer(server, Op.FIGURES)[1])) for server in range(len(self._peers))]

    def close(self) -> None:
        """Hang up."""
        self._closed = True
        for peer in self._peers:
            peer.close(flush=True)

    def _answer(self, server: int, op: Op) -> tuple[Header, memoryview]:
        found: Any
        if self._failure is not None:
            raise self._failure
        try:
            found = self._answers[server].get(timeout=ANSWER_S)
        except queue.Empty:
            raise ServerLost(f"server {server} has not answered {op.name} for {ANSWER_S:g} s") from None
        if isinstance(found, ServerLost):
            raise found
        header, payload = found
        assert header.op == op, (header, op)
        return header, payload

    def _meet(self, number: int, address: Address, key: bytes, job: str) -> Peer:
        try:
            connection = socket.create_connection(address, timeout=10)
        except OSError as error:
            raise ServerLost(f"server {number} at {address[0]}:{address[1]} cannot be reached: {error}") from error
        session = connect(connection, key, job, self.worker)
        remote = not is_loopback(connection)
        channel = Channel(connection, session, authenticate_payload=remote, limit_bytes=self._limit_bytes)
        peer = Peer(channel, f"server {number}")
        threading.Thread(target=self._listen, args=(number, peer), name=f"from server {number}", daemon=True).start()
        return peer

    def _listen(self, number: int, peer: Peer) -> None:
        try:
            while True:
                header, payload = peer.receive(self._place)
                if header.op == Op.VALUE:
                    self._take(header)
                elif header.op == Op.REFUSED:
                    raise ServerLost(f"server {number} refused worker {self.worker}: {bytes(payload).decode()}")
                else:
                    self._answers[number].put((header, payload))
        except (WireError, ServerLost) as error:
            if not self._closed:
                lost = error if isinstance(error, ServerLost) else ServerLost(f"server {number} is lost: {error}")
                with self._news:
                    self._failure = self._failure or lost
                    self._news.notify_all()
                self._answers[number].put(lost)

    def _place(self, header: Header) -> memoryview | None:
        return view(self.values[header.part]) if header.op == Op.VALUE else None

    def _take(self, header: Header) -> None:
        clock, oldest = header.step, header.epoch
        assert self.staleness is None or oldest >= clock - self.staleness, (clock, oldest, self.staleness)
        with self._news:
            self._arrived[header.part] = clock
            self.stop_at = self.stop_at or header.worker
            self._news.notify_all()
