"""One worker's connections: one to the coordinator, and one to every shard.

    client ── request ──> lock ── WorkerSession ── actions ──> SocketNetwork
                           │                               ├ ShardConnection ──> shard 0
             thread of a ──┘<── one message after another ─┤
             connection                                    └ ShardConnection ──> shard 1

    a connection's thread    connect ── read a frame ── lock ── receive
    PUSH      a gradient, or its offset in shared memory
    PARAMS    values straight to the parameters, from the socket or from a server's shared memory

One lock guards the session and the messages that it sends. No thread blocks while it holds the
lock: values are received without it, between `accept` and `receive` of the session."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable

from shoal.errors import ServerLost, WireError
from shoal.parameter_server import sparse_blocks
from shoal.parameter_server.codec import BLOCKS, SHARED, Op, as_bytes, unpack
from shoal.parameter_server.coordinator.coordinator import Address, Placement, View
from shoal.parameter_server.coordinator.watch import RETRY_S, ClusterWatcher
from shoal.parameter_server.node.server_memory import read_offsets
from shoal.parameter_server.transport.connection import Connection, Header, Payload
from shoal.parameter_server.transport.settings import Transport
from shoal.parameter_server.worker.client import RECOVER_S, WorkerClient
from shoal.parameter_server.worker.flat_params import FlatParams
from shoal.parameter_server.worker.session import (
    AnswerMessage,
    ConnectShard,
    DisconnectShard,
    NotOwnerMessage,
    PushMessage,
    RequestMessage,
    RetryLater,
    SessionAction,
    ShardMessage,
    ToShard,
    ValuesMessage,
)
from shoal.shm_backend.segment import Segment, attach


class SocketNetwork:
    """One worker's connections to all shards.

    Args:
        worker: its id among the workers of the same servers.
        coordinator: the address of the coordinator.
        transport: settings of the job.
        flat: the memory for new values, and shared memory for gradients.
        staleness: number of the slowest worker's steps that values may lack; None for any.
        shares: servers of this machine may read gradients in `flat`.

    Attributes:
        owner: the client, whose session it serves.
        read_at: offset of each partition in the shared memory of a server of this machine, in
            bytes.
        views: source of views, which name the primary of each shard.
    """

    owner: WorkerClient

    def __init__(
        self,
        worker: int,
        coordinator: Address,
        transport: Transport,
        flat: FlatParams,
        staleness: int | None = 0,
        shares: bool = True,
    ) -> None:
        self.worker = worker
        self.transport = transport.for_parts(flat.parts)
        self.flat = flat
        self.read_at = read_offsets(flat.parts, worker, staleness)
        self.shares = shares
        self._coordinator = coordinator
        self._connections: dict[int, ShardConnection] = {}
        self._is_placed = threading.Event()
        self._has_left = threading.Event()
        self.views = ClusterWatcher(
            worker,
            coordinator,
            self.transport,
            changed=self._on_view,
            placed=self._on_placement,
            answered=lambda _: self._has_left.set(),
        )

    def start(self, owner: WorkerClient) -> None:
        """Connect, and return when the shards are known. Raises ServerLost."""
        self.owner = owner
        self.views.begin()
        if not self._is_placed.wait(RECOVER_S):
            host, port = self._coordinator
            raise ServerLost(
                f"the coordinator at {host}:{port} has said nothing for {RECOVER_S:g} s."
            )

    def carry_out(self, actions: Iterable[SessionAction]) -> None:
        """Carry out a session's actions and pass its events to the owner. The lock is held."""
        for action in actions:
            match action:
                case ToShard(shard, message):
                    self._connections[shard].send(message)
                case ConnectShard(shard):
                    self._connections[shard] = ShardConnection(shard, self)
                case DisconnectShard(shard):
                    self._connections[shard].hang_up()
                case RetryLater(partition, op):
                    timer = threading.Timer(RETRY_S, self._resend, (partition, op))
                    timer.daemon = True
                    timer.start()
                case _:
                    self.owner.handle(action)

    def close(self, limit_s: float) -> None:
        """Disconnect for good: sign off at the coordinator and wait for its answer."""
        self.views.post(Op.LEAVE)
        self._has_left.wait(limit_s)
        self.views.close()
        for connection in self._connections.values():
            connection.close()

    def _on_view(self, view: View) -> None:
        with self.owner.lock:
            self.carry_out(self.owner.session.view_changed(view))

    def _on_placement(self, placement: Placement) -> None:
        with self.owner.lock:
            self.carry_out(self.owner.session.placement_changed(placement))
        self._is_placed.set()

    def _resend(self, partition: int, op: Op) -> None:
        with self.owner.lock:
            self.carry_out(self.owner.session.resend(partition, op))


class ShardConnection:
    """A connection to the current primary of a shard. It reconnects after a loss.

    Args: network: of the worker, which carries out the actions of its session.
    """

    def __init__(self, shard: int, network: SocketNetwork) -> None:
        self.shard = shard
        self._network = network
        self._owner = network.owner
        self._flat = network.flat
        self._peer: Connection | None = None
        self._is_lending = False  # the server reads gradients in this worker's memory
        self._borrowed: Segment | None = None  # the server's memory
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
            case RequestMessage(op, about, step, payload):
                self._post(op, payload, partition=about, step=step)

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
            at_bytes = self._flat.lent_at[partition]
            lent = self._flat.lent.tensor(at_bytes, gradient.numel(), gradient.dtype)
            if lent.data_ptr() != gradient.data_ptr():  # it is not there yet
                lent.copy_(gradient)
                self._owner.session.replace_gradient(partition, lent)
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
            view = self._network.views.wait_for_view(
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
        peer = self._network.transport.connect(address, view.primary, self._network.worker)
        with self._owner.lock:
            self._peer = peer
            self._is_lending = False
            self._borrowed = None
            if self._network.shares:
                self._post(Op.USE_SHARED_MEMORY, json.dumps(self._flat.lent.description).encode())
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
        return as_bytes(self._flat.values[header.partition])

    def _accept(self, header: Header) -> None:
        changed_only = bool(header.flags & BLOCKS)
        self._arriving = ValuesMessage(
            header.partition, header.step, header.epoch, header.worker, changed_only
        )
        with self._owner.lock:
            self._accepted = self._owner.session.accept(self.shard, self._arriving)

    def _receive_values(self, header: Header, payload: memoryview) -> None:
        if not header.length:
            self._accept(header)
        values = self._flat.values[header.partition]
        if self._accepted and header.flags & SHARED:
            assert self._borrowed is not None
            at_bytes = self._network.read_at[header.partition]
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


class Refusal(Exception):
    """A server refused a request of this worker."""
