"""A worker's connection to one shard: messages become frames, and frames become messages.

    lock ── send ──> frames ──> the current primary        PUSH    a gradient, or its offset
    thread: connect ── read a frame ── lock ── receive     PARAMS  straight to the parameters

Values come from the socket, or from the shared memory of a server of this machine, and are written
into the memory of the parameters. That happens without the lock, between `accept` and `receive` of
the session.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from shoal.errors import WireError
from shoal.parameter_server import sparse_blocks
from shoal.parameter_server.codec import BLOCKS, SHARED, Op, as_bytes, unpack
from shoal.parameter_server.coordinator.coordinator import View
from shoal.parameter_server.coordinator.watch import RETRY_S, ClusterWatcher
from shoal.parameter_server.transport.connection import Connection, Payload
from shoal.parameter_server.transport.frame import Header
from shoal.parameter_server.transport.settings import Transport
from shoal.parameter_server.worker.worker_messages import (
    AnswerMessage,
    NoticeMessage,
    NotOwnerMessage,
    PushMessage,
    QueryMessage,
    ShardMessage,
    StepMessage,
    ValuesMessage,
)
from shoal.parameter_server.worker.worker_network import SessionOwner, WorkerNetwork
from shoal.shm_backend.segment import AttachedSegment, SharedSegment, attach

RECOVER_S = 60.0
"""Limit of the time that a shard may be without a primary."""


@dataclass(frozen=True)
class WorkerMemory:
    """Memory of one worker. All lists are by partition.

    Args:
        values: the memory for new values.
        read_at: offset of the values in the shared memory of a server of this machine, in bytes.
        lent: shared memory for gradients, which servers of this machine read.
        lent_at: offset of each gradient in `lent`, in bytes; empty to send all gradients.
    """

    values: Sequence[Tensor]
    read_at: Sequence[int]
    lent: SharedSegment
    lent_at: Sequence[int]


class ShardConnection:
    """A connection to the current primary of a shard. It reconnects after a loss.

    Args:
        worker: id of this worker at the servers.
        owner: owner of the session.
        network: carries out the actions of the session.
        transport: settings of the job.
        views: source of views, which name the primary.
    """

    def __init__(
        self,
        shard: int,
        worker: int,
        owner: SessionOwner,
        network: WorkerNetwork,
        memory: WorkerMemory,
        transport: Transport,
        views: ClusterWatcher,
    ) -> None:
        self.shard = shard
        self.worker = worker
        self._owner = owner
        self._network = network
        self._memory = memory
        self._transport = transport
        self._views = views
        self._peer: Connection | None = None
        self._is_lending = False  # the server reads gradients in this worker's memory
        self._borrowed: AttachedSegment | None = None  # the server's memory
        self._arriving: ValuesMessage | None = None  # of the frame that arrives now
        self._accepted = False  # the session wants its values
        self._closed = False
        threading.Thread(target=self._run_or_report, name=f"shard {shard}", daemon=True).start()

    # Sending; the lock is held

    def send(self, message: ShardMessage) -> None:
        """Send a message; drop it where the connection is lost, because the session sends it
        again.
        """
        match message:
            case PushMessage():
                self._send_push(message)
            case StepMessage(step, payload):
                self._post(Op.STEP, payload, step=step)
            case QueryMessage(op, about, step, payload):
                self._post(op, payload, partition=about, step=step)
            case NoticeMessage(op):
                self._post(op)

    def hang_up(self) -> None:
        """Close the present connection; its thread notices and connects again."""
        if self._peer is not None:
            self._peer.hang_up()

    def _post(self, op: Op, payload: Payload = b"", **fields: int) -> None:
        if self._peer is not None:
            self._peer.post(op, payload, **fields)

    def _send_push(self, push: PushMessage) -> None:
        partition = push.partition
        step = push.step
        gradient = push.gradient
        if 0 in push.present:
            self._post(Op.GRAD_MASK, push.present, partition=partition)
        if self._is_lending:
            at_bytes = self._write_to_shared_memory(push)
            # The header has no field of 64 bits, so two fields hold the offset.
            high, low = at_bytes >> 32, at_bytes & 0xFFFFFFFF
            self._post(
                Op.PUSH, partition=partition, step=step, flags=SHARED, epoch=high, worker=low
            )
            return
        blocks = sparse_blocks.nonzero_blocks(gradient) if push.sparse else None
        if blocks is not None and sparse_blocks.are_few(blocks):
            packed = sparse_blocks.pack(gradient, blocks)
            self._post(Op.PUSH, packed, partition=partition, step=step, flags=BLOCKS)
        else:
            self._post(Op.PUSH, gradient, partition=partition, step=step)

    def _write_to_shared_memory(self, push: PushMessage) -> int:
        """Copy a gradient to memory that the server reads, if it is not there. Return its
        offset.
        """
        at_bytes = self._memory.lent_at[push.partition]
        gradient = push.gradient
        lent = self._memory.lent.tensor(at_bytes, gradient.numel(), gradient.dtype)
        if lent.data_ptr() != gradient.data_ptr():
            lent.copy_(gradient)
            self._owner.session.replace_gradient(push.partition, lent)
        return at_bytes

    # The thread of the connection

    def close(self) -> None:
        """Disconnect for good, after all queued frames are sent."""
        self._closed = True
        if self._peer is not None:
            self._peer.close(flush=True)

    def _run_or_report(self) -> None:
        try:
            self._run()
        # Values that are too stale, for example. Without a report, the worker would wait for ever.
        except BaseException as error:
            doubt = f"what its server said cannot be right ({error!r})"
            self._fail(f"{doubt}, and what follows is not believed")
            raise

    def _run(self) -> None:
        """Stay connected to the current primary, until `close` or until the shard is lost."""
        epoch = 1
        lost_at_s = time.monotonic()
        while not self._closed:
            view = self._views.wait_for_view(
                self.shard,
                RECOVER_S,
                lambda known, epoch=epoch: known.epoch >= epoch,  # type: ignore[misc]
            )
            if view is not None and view.retired:
                return
            if view is not None and view.lost:
                self._fail("its servers are gone, and nobody holds what they held")
                return
            if view is None or time.monotonic() > lost_at_s + RECOVER_S:
                self._fail(f"it has had no primary for {RECOVER_S:g} s")
                return
            try:
                self._connect(view)
                while True:
                    self._receive()
            except Refusal as error:
                self._fail(str(error))
                return
            except (OSError, WireError):
                if self._disconnect():
                    lost_at_s = time.monotonic()
                epoch = view.epoch
                time.sleep(RETRY_S)

    def _connect(self, view: View) -> None:
        if view.primary is None:
            raise WireError("no primary")
        address = view.addresses[view.primary]
        peer = self._transport.connect(address, view.primary, self.worker)
        with self._owner.lock:
            self._peer = peer
            self._is_lending = False
            self._borrowed = None
            if self._memory.lent_at:
                self._post(Op.USE_SHARED_MEMORY, json.dumps(self._memory.lent.description).encode())
            self._network.carry_out(self._owner.session.connected(view))

    def _disconnect(self) -> bool:
        """End the connection. Return True if there was one until now."""
        with self._owner.lock:
            peer = self._peer
            self._peer = None
            self._network.carry_out(self._owner.session.disconnected(self.shard))
        if peer is not None:
            peer.close()
        return peer is not None

    def _fail(self, reason: str) -> None:
        if not self._closed:
            with self._owner.lock:
                self._network.carry_out(self._owner.session.fail(self.shard, reason))

    # Receiving

    def _receive(self) -> None:
        """Read one frame. Raises WireError, Refusal."""
        assert self._peer is not None
        header, payload = self._peer.receive(self._buffer)
        match header.op:
            case Op.PARAMS:
                self._receive_values(header, payload)
            case Op.USE_SHARED_MEMORY:
                self._attach_server_memory(payload)
            case Op.MOVED:
                self._deliver(NotOwnerMessage(header.partition, Op(header.step)))
            case Op.REFUSED:
                reason = bytes(payload).decode()
                # A server that is no primary any more is like a lost connection: the next view
                # tells where to go. Any other refusal would come again.
                if "is not the primary" not in reason:
                    raise Refusal(reason)
                raise WireError(reason)
            case _:
                self._deliver(AnswerMessage(Op(header.op), header.partition, payload))

    def _deliver(self, message: AnswerMessage | NotOwnerMessage | ValuesMessage) -> None:
        with self._owner.lock:
            self._network.carry_out(self._owner.session.receive(self.shard, message))

    def _buffer(self, header: Header) -> memoryview | None:
        """Return the memory of a partition for a full set of its values; None for other
        payloads.
        """
        if header.op != Op.PARAMS:
            return None
        self._accept(header)
        if not self._accepted or header.flags & BLOCKS:
            return None
        return as_bytes(self._memory.values[header.partition])

    def _accept(self, header: Header) -> None:
        self._arriving = _values(header)
        with self._owner.lock:
            self._accepted = self._owner.session.accept(self.shard, self._arriving)

    def _receive_values(self, header: Header, payload: memoryview) -> None:
        if not header.length:
            self._accept(header)
        values = self._memory.values[header.partition]
        if self._accepted and header.flags & SHARED:
            assert self._borrowed is not None
            at_bytes = self._memory.read_at[header.partition]
            values.copy_(self._borrowed.tensor(at_bytes, values.numel(), values.dtype))
        elif self._accepted and header.flags & BLOCKS:
            sparse_blocks.unpack(payload, values)
        assert self._arriving is not None
        self._deliver(self._arriving)

    def _attach_server_memory(self, payload: memoryview) -> None:
        """Attach the server's shared memory; the server has attached this worker's memory."""
        segment = attach(unpack(payload))
        with self._owner.lock:
            self._is_lending = segment is not None
            self._borrowed = segment
            if segment is not None:
                self._post(Op.USE_SHARED_MEMORY, b"{}")


def _values(header: Header) -> ValuesMessage:
    """Read the header of PARAMS."""
    changed_only = bool(header.flags & BLOCKS)
    return ValuesMessage(header.partition, header.step, header.epoch, header.worker, changed_only)


class Refusal(Exception):
    """A server refused a request of this worker."""
