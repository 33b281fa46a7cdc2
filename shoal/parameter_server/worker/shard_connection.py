"""A worker's connection to one shard: messages become frames, and frames become messages.

    lock ── send ──> frames ──> the primary, whoever it is      PUSH    a gradient, or where it lies
    thread: connect ── read a frame ── lock ── receive          VALUE   straight to the parameters

Values come from the socket, or from the memory of a server of this machine, to where the parameters
lie. That is done without the lock, between `accept` and `receive` of the session.
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
from shoal.parameter_server.transport.connection import Payload, QueuedConnection
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
"""How long a shard may be without a primary."""


@dataclass(frozen=True)
class WorkerMemory:
    """Memory of one worker. All lists are by partition.

    Args:
        values: where new values are written.
        read_at: where values lie in the memory of a server of this machine, in bytes.
        lent: has room for gradients; servers of this machine read it.
        lent_at: where in it each gradient is laid, in bytes; empty to send all gradients.
    """

    values: Sequence[Tensor]
    read_at: Sequence[int]
    lent: SharedSegment
    lent_at: Sequence[int]


class ShardConnection:
    """A connection to whoever is the primary of a shard, made again when it breaks.

    Args:
        worker: the number that servers know this end by.
        owner: of the session that this connection is for.
        network: carries out what the session asks for.
        transport: settings of the job.
        views: who is the primary.
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
        self.shard, self.worker = shard, worker
        self._owner, self._network = owner, network
        self._memory, self._transport, self._views = memory, transport, views
        self._peer: QueuedConnection | None = None
        self._is_lending = False  # the server reads gradients in this worker's memory
        self._borrowed: AttachedSegment | None = None  # the server's memory
        self._coming: ValuesMessage | None = None  # of the frame that is coming in
        self._accepted = False  # its values are to be written
        self._closed = False
        threading.Thread(target=self._run_or_report, name=f"shard {shard}", daemon=True).start()

    # Sending; the lock is held

    def send(self, message: ShardMessage) -> None:
        """Send a message, or nothing where the connection is lost."""
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
        """End the present connection; its reader notices and makes another one."""
        if self._peer is not None:
            self._peer.channel.close()

    def _post(self, op: Op, payload: Payload = b"", **fields: int) -> None:
        if self._peer is not None:
            self._peer.post(op, payload, **fields)

    def _send_push(self, push: PushMessage) -> None:
        partition, step, gradient = push.partition, push.step, push.gradient
        if 0 in push.present:
            self._post(Op.GRAD_MASK, push.present, partition=partition)
        if self._is_lending:
            at_bytes = self._lay(push)
            high, low = at_bytes >> 32, at_bytes & 0xFFFFFFFF
            self._post(
                Op.PUSH, partition=partition, step=step, flags=SHARED, epoch=high, worker=low
            )
            return
        which = sparse_blocks.nonzero_blocks(gradient) if push.sparse else None
        if which is not None and sparse_blocks.are_few(which):
            packed = sparse_blocks.pack(gradient, which)
            self._post(Op.PUSH, packed, partition=partition, step=step, flags=BLOCKS)
        else:
            self._post(Op.PUSH, gradient, partition=partition, step=step)

    def _lay(self, push: PushMessage) -> int:
        """Have a gradient in memory that the server reads; where, in bytes."""
        at_bytes, gradient = self._memory.lent_at[push.partition], push.gradient
        lent = self._memory.lent.tensor(at_bytes, gradient.numel(), gradient.dtype)
        if lent.data_ptr() != gradient.data_ptr():
            lent.copy_(gradient)
            self._owner.session.replace_gradient(push.partition, lent)
        return at_bytes

    # The thread of the connection

    def close(self) -> None:
        """Disconnect for good, once all is sent."""
        self._closed = True
        if self._peer is not None:
            self._peer.close(flush=True)

    def _run_or_report(self) -> None:
        try:
            self._run()
        except BaseException as error:  # a value that is too stale, say: all would wait for ever
            doubt = f"what its server said cannot be right ({error!r})"
            self._give_up(f"{doubt}, and what follows is not believed")
            raise

    def _run(self) -> None:
        """Be connected to the primary, whoever it is."""
        epoch, since = 1, time.monotonic()
        while not self._closed:
            known = self._views.wait_for_view(
                self.shard,
                RECOVER_S,
                lambda view, epoch=epoch: view.epoch >= epoch,  # type: ignore[misc]
            )
            if known is not None and known.retired:
                return
            if known is not None and known.lost:
                self._give_up("its servers are gone, and nobody holds what they held")
                return
            if known is None or time.monotonic() > since + RECOVER_S:
                self._give_up(f"it has had no primary for {RECOVER_S:g} s")
                return
            try:
                self._connect(known)
                while True:
                    self._receive()
            except Refusal as error:
                self._give_up(str(error))
                return
            except (OSError, WireError):
                if self._disconnect():
                    since = time.monotonic()
                epoch = known.epoch
                time.sleep(RETRY_S)

    def _connect(self, known: View) -> None:
        if known.primary is None:
            raise WireError("no primary")
        address = known.addresses[known.primary]
        channel = self._transport.connect(address, known.primary, self.worker)
        peer = QueuedConnection(channel, f"shard {self.shard}")
        with self._owner.lock:
            self._peer, self._is_lending, self._borrowed = peer, False, None
            if self._memory.lent_at:
                self._post(Op.USE_SHARED_MEMORY, json.dumps(self._memory.lent.description).encode())
            self._network.carry_out(self._owner.session.connected(known))

    def _disconnect(self) -> bool:
        """Give the connection up. Returns whether there was one until now."""
        with self._owner.lock:
            peer, self._peer = self._peer, None
            self._network.carry_out(self._owner.session.disconnected(self.shard))
        if peer is not None:
            peer.close()
        return peer is not None

    def _give_up(self, reason: str) -> None:
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
                self._share(payload)
            case Op.MOVED:
                self._tell(NotOwnerMessage(header.partition, Op(header.step)))
            case Op.REFUSED:
                reason = bytes(payload).decode()
                if "is not the primary" not in reason:
                    raise Refusal(reason)
                raise WireError(reason)
            case _:
                self._tell(AnswerMessage(Op(header.op), header.partition, payload))

    def _tell(self, message: AnswerMessage | NotOwnerMessage | ValuesMessage) -> None:
        with self._owner.lock:
            self._network.carry_out(self._owner.session.receive(self.shard, message))

    def _buffer(self, header: Header) -> memoryview | None:
        """A partition's own memory for all of its values; None for other payloads."""
        if header.op != Op.PARAMS:
            return None
        self._accept(header)
        is_whole = not header.flags & BLOCKS
        return (
            as_bytes(self._memory.values[header.partition]) if self._accepted and is_whole else None
        )

    def _accept(self, header: Header) -> None:
        self._coming = _values(header)
        with self._owner.lock:
            self._accepted = self._owner.session.accept(self.shard, self._coming)

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
        assert self._coming is not None
        self._tell(self._coming)

    def _share(self, payload: memoryview) -> None:
        """The server has this worker's memory, and lends its own."""
        found = attach(unpack(payload))
        with self._owner.lock:
            self._is_lending, self._borrowed = found is not None, found
            if found is not None:
                self._post(Op.USE_SHARED_MEMORY, b"{}")


def _values(header: Header) -> ValuesMessage:
    """Read the header of a VALUE."""
    changed_only = bool(header.flags & BLOCKS)
    return ValuesMessage(header.partition, header.step, header.epoch, header.worker, changed_only)


class Refusal(Exception):
    """A server took what this worker said for nonsense."""
