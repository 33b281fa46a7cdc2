"""Connections of a server's peers, and the answers to its workers.

PullResponse ──> PARAMS     the values; or only the blocks that have changed; or nothing, where the
                            worker reads shared memory. Its field `worker` carries the step after
                            which all workers stop.
GradNormResponse, GradResponse, LoadDone ──> NORM, GRADIENT, LOAD
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
from shoal.parameter_server.transport.connection import Connection, Payload


class ConnectedWorkers:
    """Peers of one server. The caller holds the server's lock.

    Attributes:
        stop_at: steps after which all workers stop; 0 before anyone has asked for it.
        sent_bytes: payload bytes of all answers to workers.
    """

    def __init__(self) -> None:
        self._peers: dict[int, Connection] = {}
        self._sharing: set[int] = set()
        self.stop_at = 0
        self.sent_bytes = 0

    def connect(self, number: int, peer: Connection) -> Connection | None:
        """Add a peer's connection. Return its previous one if that has not ended yet."""
        previous = self._peers.get(number)
        self._peers[number] = peer
        self._sharing.discard(number)
        return previous

    def disconnect(self, number: int, peer: Connection) -> None:
        """Remove a connection that has ended, unless a newer one has replaced it."""
        if self._peers.get(number) is peer:
            del self._peers[number]
            self._sharing.discard(number)

    def use_shared_memory(self, worker: int) -> None:
        """Send this worker no values any more: it reads them in this server's memory."""
        self._sharing.add(worker)

    def stop_after(self, steps: int) -> None:
        """Let all workers stop after `steps` steps, unless a stop is already decided."""
        self.stop_at = self.stop_at or steps

    def send(self, message: Outgoing) -> None:
        """Send an answer to its worker."""
        match message:
            case PullResponse(worker, partition, clock, min_clock):
                flags, payload = self._pack_values(message)
                self._post(
                    worker,
                    Op.PARAMS,
                    payload,
                    partition=partition,
                    step=clock,
                    epoch=min_clock,
                    worker=self.stop_at,
                    flags=flags,
                )
            case GradNormResponse(worker, partition, squared):
                # Hexadecimal, so that no bit of the number is lost.
                self._post(worker, Op.NORM, squared.hex().encode(), partition=partition)
            case GradResponse(worker, partition, values, grad_mask):
                gradient = grad_mask + bytes(as_bytes(values))
                self._post(worker, Op.GRADIENT, gradient, partition=partition)
            case LoadDone(worker, partition):
                self._post(worker, Op.LOAD, b"", partition=partition)

    def _pack_values(self, response: PullResponse) -> tuple[int, Payload]:
        """Return flags and payload: nothing for shared memory, changed blocks, or all values."""
        if response.worker in self._sharing:
            return SHARED, b""
        blocks = response.changed_blocks
        if blocks is not None and sparse_blocks.are_few(blocks):
            return BLOCKS, sparse_blocks.pack(response.values, blocks)
        return 0, response.values

    def _post(self, number: int, op: Op, payload: Payload, **fields: int) -> None:
        peer = self._peers.get(number)
        if peer is None:
            return  # a worker that has gone sends its request again when it is back
        self.sent_bytes += (
            len(payload) if isinstance(payload, bytes) else payload.numel() * payload.itemsize
        )
        peer.post(op, payload, **fields)
