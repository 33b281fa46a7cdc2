"""Who is connected to a server, and what its workers are told.

Value ──> VALUE     the numbers, or the blocks of them that have changed, or only that they are to be read in
                    shared memory; with them, after which step all workers are to stop
Norm, Gradient, Loaded ──> NORM, GRADIENT, LOAD
"""

from __future__ import annotations

from shoal.parameter_server import sparse_blocks
from shoal.parameter_server.codec import BLOCKS, SHARED, Op, as_bytes
from shoal.parameter_server.events import (
    GradNormResponse,
    GradResponse,
    LoadDone,
    Outgoing,
    PullResponse,
)
from shoal.parameter_server.transport.connection import Payload, QueuedConnection


class ConnectedWorkers:
    """One server's. Whoever calls it holds the server's lock.

    Attributes:
        stop_at: how many steps all workers take before they stop; 0 while nobody has asked for it.
        sent_bytes: of all that workers were told.
    """

    def __init__(self) -> None:
        self._peers: dict[int, QueuedConnection] = {}
        self._sharing: set[int] = set()
        self.stop_at = self.sent_bytes = 0

    def connect(self, number: int, peer: QueuedConnection) -> QueuedConnection | None:
        """Someone has connected. Returns its connection before this one, if that is not closed
        yet.
        """
        before, self._peers[number] = self._peers.get(number), peer
        self._sharing.discard(number)
        return before

    def disconnect(self, number: int, peer: QueuedConnection) -> None:
        """A connection has ended."""
        if self._peers.get(number) is peer:
            del self._peers[number]
            self._sharing.discard(number)

    def use_shared_memory(self, worker: int) -> None:
        """From now on a worker reads values in this server's memory."""
        self._sharing.add(worker)

    def stop_after(self, steps: int) -> None:
        """Have all workers stop when they have taken so many steps, unless they are to stop
        already.
        """
        self.stop_at = self.stop_at or steps

    def send(self, message: Outgoing) -> None:
        """Answer a worker."""
        match message:
            case PullResponse(worker, part, clock, oldest):
                flags, payload = self._packed(message)
                self._to(
                    worker,
                    Op.PARAMS,
                    payload,
                    partition=part,
                    step=clock,
                    epoch=oldest,
                    worker=self.stop_at,
                    flags=flags,
                )
            case GradNormResponse(worker, part, squared):
                self._to(worker, Op.NORM, squared.hex().encode(), partition=part)
            case GradResponse(worker, part, numbers, present):
                self._to(worker, Op.GRADIENT, present + bytes(as_bytes(numbers)), partition=part)
            case LoadDone(worker, part):
                self._to(worker, Op.LOAD, b"", partition=part)

    def _packed(self, value: PullResponse) -> tuple[int, Payload]:
        """Values for a worker that reads them here, for one that lacks a few blocks, or whole."""
        if value.worker in self._sharing:
            return SHARED, b""
        if value.changed_blocks is not None and sparse_blocks.are_few(value.changed_blocks):
            return BLOCKS, sparse_blocks.pack(value.values, value.changed_blocks)
        return 0, value.values

    def _to(self, number: int, op: Op, payload: Payload, **fields: int) -> None:
        peer = self._peers.get(number)
        if peer is not None:  # one that is gone asks again when it is back
            self.sent_bytes += (
                len(payload) if isinstance(payload, bytes) else payload.numel() * payload.itemsize
            )
            peer.post(op, payload, **fields)
