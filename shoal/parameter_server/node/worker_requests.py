"""Frames of workers, as calls of the shard.

PUSH                       the gradient, out of receive buffers ──> Shard.push
STEP NORM GRADIENT PULL LOAD ──────────────────────────────────> Shard; it answers in time
STATE STATS HISTORY USE_SHARED_MEMORY STOP RECORD ────────────> answered here, if at all
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from shoal.parameter_server.codec import (
    BLOCKS,
    Op,
    pack_partition,
    unpack,
    unpack_order,
    unpack_part,
)
from shoal.parameter_server.events import Outgoing, ProtocolViolation
from shoal.parameter_server.node.connected_workers import ConnectedWorkers
from shoal.parameter_server.node.receive_buffers import ReceiveBuffers
from shoal.parameter_server.node.shard import Shard
from shoal.parameter_server.node.shared_values import SharedValues
from shoal.parameter_server.transport.connection import Connection
from shoal.parameter_server.transport.frame import Header

_STEP_OPS = (Op.STEP, Op.NORM, Op.GRADIENT, Op.PULL, Op.LOAD)
_STOP_MARGIN_STEPS = 3
"""No worker is so many steps ahead of the newest step request, so all learn of a stop in time."""


class WorkerRequests:
    """Requests of one server's workers. The caller holds the server's lock.

    Args:
        server: the server's number, which marks its part of the event log.
        figures: returns the server's figures, for STATS.
        on_step: is called after each step request, when a worker has read all values.
    """

    def __init__(
        self,
        server: int,
        shard: Shard,
        buffers: ReceiveBuffers,
        workers: ConnectedWorkers,
        shared_values: SharedValues,
        figures: Callable[[], dict[str, Any]],
        on_step: Callable[[], None],
    ) -> None:
        self._server = server
        self._shard = shard
        self._buffers = buffers
        self._workers = workers
        self._shared_values = shared_values
        self._figures = figures
        self._on_step = on_step

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
        if header.op == Op.PUSH:
            return self._push(worker, header, payload, meta)
        if header.op in _STEP_OPS:
            return self._handle_step(worker, header, payload)
        self._handle_other(worker, peer, header, payload)
        return []

    def gradient(
        self, worker: int, header: Header, payload: memoryview, meta: bytes
    ) -> tuple[Tensor, bytes]:
        """Return the gradient of a PUSH, flat, and its mask: a byte for each segment.

        Raises: NotOwner, ProtocolViolation: as `handle`.
        """
        segments = self._shard.require_partition(header.partition).part.segments
        gradient = self._buffers.pushed(worker, header, payload)
        return gradient, meta or b"\1" * len(segments)

    def _push(
        self, worker: int, header: Header, payload: memoryview, meta: bytes
    ) -> Iterable[Outgoing]:
        gradient, grad_mask = self.gradient(worker, header, payload, meta)
        sparse = bool(header.flags & BLOCKS)
        return self._shard.push(worker, header.step, header.partition, gradient, grad_mask, sparse)

    def _handle_step(self, worker: int, header: Header, payload: memoryview) -> Iterable[Outgoing]:
        """Handle a request that the shard answers."""
        shard, step, partition = self._shard, header.step, header.partition
        match header.op:
            case Op.STEP:
                messages = shard.request_step(worker, step, unpack_order(payload))
                self._on_step()
                return messages
            case Op.NORM | Op.GRADIENT:
                as_tensor = header.op == Op.GRADIENT
                return shard.query_gradient(worker, step, partition, as_tensor)
            case Op.PULL:
                return shard.pull(worker, partition)
            case Op.LOAD:
                values, state, _ = unpack_part(payload)
                return shard.load(worker, partition, values, list(state), step)
        raise AssertionError(header.op)

    def _handle_other(
        self, worker: int, peer: Connection, header: Header, payload: memoryview
    ) -> None:
        """Handle a request that is answered at once, or not at all."""
        shard, partition = self._shard, header.partition
        match header.op:
            case Op.STOP:
                newest = max((step for step, _ in shard.step_requests.values()), default=0)
                self._workers.stop_after(newest + _STOP_MARGIN_STEPS)
            case Op.USE_SHARED_MEMORY:
                self._share_memory(worker, peer, payload)
            case Op.STATE:
                state = shard.require_partition(partition)
                packed = pack_partition(state.values, list(state.state()), shard.done[partition])
                peer.post(Op.STATE, packed, partition=partition, step=state.clock)
            case Op.STATS:
                peer.post(Op.STATS, json.dumps(self._figures()).encode(), partition=partition)
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
            self._workers.use_shared_memory(worker)
            return
        can_read = self._buffers.attach_worker_memory(worker, description)
        answer = self._shared_values.memory.description if can_read else {}
        peer.post(Op.USE_SHARED_MEMORY, json.dumps(answer).encode())

    def _history(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the next chunk of the event log.

        It follows the events that the worker has. It is the first chunk if the worker's came from
        another server: that one's log has gone with it.
        """
        first = int(request["first"]) if request.get("server") == self._server else 0
        log = self._shard.history
        number, events, more = (0, [], False) if log is None else log.chunk(first)
        return {"server": self._server, "first": number, "events": events, "more": more}
