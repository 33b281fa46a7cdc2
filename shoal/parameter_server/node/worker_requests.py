"""Workers of one server: their connections, their requests, and the answers.

              ┌ STEP, PUSH, NORM, GRADIENT, PULL, LOAD ──> Shard ──> answers
    a worker ─┤
              └ STATE, STATS, HISTORY, ... ── are answered here

PullResponse ──> PARAMS     the values; or only the blocks that have changed; or nothing, where the
                            worker reads shared memory. Its field `worker` carries the step after
                            which all workers stop.
GradNormResponse, GradResponse, LoadDone ──> NORM, GRADIENT, LOAD
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from shoal.parameter_server import sparse_blocks
from shoal.parameter_server.codec import (
    BLOCKS,
    SHARED,
    Op,
    as_bytes,
    pack_partition,
    unpack,
    unpack_part,
)
from shoal.parameter_server.events import (
    GradNormResponse,
    GradResponse,
    LoadDone,
    Outgoing,
    ProtocolViolation,
    PullResponse,
    StepRequest,
)
from shoal.parameter_server.transport.connection import Connection, Header, Payload

if TYPE_CHECKING:
    from shoal.parameter_server.node.node_server import ServerNode

_STOP_MARGIN_STEPS = 3
"""No worker is so many steps ahead of the newest step request, so all learn of a stop in time."""


class WorkerRequests:
    """Connections and requests of one server's workers. The caller holds the server's lock.

    Attributes:
        sent_bytes: payload bytes of all answers to workers.
    """

    def __init__(self, node: ServerNode) -> None:
        self._node = node
        self._shard = node.shard
        self._peers: dict[int, Connection] = {}
        self._sharing: set[int] = set()  # workers that read values in this server's memory
        self._stop_at = 0  # steps after which all workers stop; 0 before anyone has asked for it
        self.sent_bytes = 0

    # Connections

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

    # Requests

    def handle(
        self, worker: int, peer: Connection, header: Header, payload: memoryview, meta: bytes
    ) -> Iterable[Outgoing]:
        """Handle a worker's frame, and return the messages to send.

        Args:
            meta: payload of the frame that described this one's payload; empty if there was none.

        Raises:
            NotOwner: the shard does not answer for the partition.
            ProtocolViolation: the frame makes no sense.
        """
        shard, step, partition = self._shard, header.step, header.partition
        match header.op:
            case Op.PUSH:
                segments = shard.require_partition(partition).part.segments
                gradient = self._node.buffers.pushed(worker, header, payload)
                # The frame before it has the mask, unless every segment has a gradient.
                grad_mask = meta or b"\1" * len(segments)
                sparse = bool(header.flags & BLOCKS)
                return shard.push(worker, step, partition, gradient, grad_mask, sparse)
            case Op.STEP:
                messages = shard.request_step(worker, step, StepRequest(**unpack(payload)))
                # Before its step request a worker has read all values.
                self._node.migration.free_removed()
                return messages
            case Op.NORM | Op.GRADIENT:
                as_tensor = header.op == Op.GRADIENT
                return shard.query_gradient(worker, step, partition, as_tensor)
            case Op.PULL:
                return shard.pull(worker, partition)
            case Op.LOAD:
                values, state, _ = unpack_part(payload)
                return shard.load(worker, partition, values, list(state), step)
        self._handle_other(worker, peer, header, payload)
        return []

    def _handle_other(
        self, worker: int, peer: Connection, header: Header, payload: memoryview
    ) -> None:
        """Handle a request that is answered at once, or not at all."""
        shard, partition = self._shard, header.partition
        match header.op:
            case Op.STOP:
                newest = max((step for step, _ in shard.step_requests.values()), default=0)
                self._stop_at = self._stop_at or newest + _STOP_MARGIN_STEPS
            case Op.USE_SHARED_MEMORY:
                self._share_memory(worker, peer, payload)
            case Op.STATE:
                state = shard.require_partition(partition)
                packed = pack_partition(state.values, state.state(), shard.done[partition])
                peer.post(Op.STATE, packed, partition=partition, step=state.clock)
            case Op.STATS:
                peer.post(Op.STATS, json.dumps(self._node.figures()).encode(), partition=partition)
            case Op.RECORD:
                shard.record()
            case Op.HISTORY:
                history = json.dumps(self._history(unpack(payload))).encode()
                peer.post(Op.HISTORY, history, partition=partition)
            case _:
                raise ProtocolViolation(f"message {header.op}, which is not known")

    def _share_memory(self, worker: int, peer: Connection, payload: memoryview) -> None:
        """Share memory with a worker of this host, which takes two messages.

        First the worker describes the memory of its gradients. The answer describes this server's
        memory if it can read the worker's, and is empty if not. Then, if the worker can read this
        server's memory, it sends an empty description.
        """
        description = unpack(payload)
        if not description:
            self._sharing.add(worker)
            return
        can_read = self._node.buffers.attach_worker_memory(worker, description)
        answer = self._node.shared_values.memory.description if can_read else {}
        peer.post(Op.USE_SHARED_MEMORY, json.dumps(answer).encode())

    def _history(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the next chunk of the event log.

        It follows the events that the worker has. It is the first chunk if the worker's came from
        another server: that one's log has gone with it.
        """
        first = int(request["first"]) if request.get("server") == self._node.config.server else 0
        log = self._shard.history
        number, events, more = (0, [], False) if log is None else log.chunk(first)
        return {"server": self._node.config.server, "first": number, "events": events, "more": more}

    # Answers

    def send(self, message: Outgoing) -> None:
        """Send an answer to its worker."""
        match message:
            case PullResponse(worker, partition, clock, min_clock):
                # Nothing for shared memory, changed blocks, or all values.
                flags, blocks = 0, message.changed_blocks
                payload: Payload = message.values
                if worker in self._sharing:
                    flags, payload = SHARED, b""
                elif blocks is not None and sparse_blocks.are_few(blocks):
                    flags, payload = BLOCKS, sparse_blocks.pack(message.values, blocks)
                self._post(
                    worker,
                    Op.PARAMS,
                    payload,
                    partition=partition,
                    step=clock,
                    epoch=min_clock,
                    worker=self._stop_at,
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

    def _post(self, number: int, op: Op, payload: Payload, **fields: int) -> None:
        peer = self._peers.get(number)
        if peer is None:
            return  # a worker that has gone sends its request again when it is back
        self.sent_bytes += (
            len(payload) if isinstance(payload, bytes) else payload.numel() * payload.itemsize
        )
        peer.post(op, payload, **fields)
