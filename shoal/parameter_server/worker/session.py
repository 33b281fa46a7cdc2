"""A worker's side of its servers, without I/O: no sockets, no threads, no clocks, no callbacks.

Everything that affects the state machine is in this file. Three kinds of calls come in:

    the worker        push, request_step, query, query_shard, pull, record, request_stop
    the coordinator   placement_changed, view_changed
    the network       connected, disconnected, accept, receive, resend, fail

and each returns the actions that follow: messages for shards, connections to make or end, events.

    partition 3   push ── sent ── answered ── forgotten
                    ├ lost connection ── connected ──┐
                    ├ moved ── placement_changed ────┼── sent again, to the present owner
                    └ not the owner ── resend ───────┘

    the worker's request ──> WorkerSession ──> ToShard(shard, message)     the network sends it
    a shard's message ─────> WorkerSession ──> ValuesArrived, ...          the owner of the session
                                       └─────> ConnectShard, ...           the network

A request is kept until it is answered, so it may be sent twice; a shard applies a push once, and
answers it twice. While a partition moves between shards its requests wait for the new owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from shoal.errors import ServerLost
from shoal.parameter_server.codec import Op
from shoal.parameter_server.coordinator.coordinator import Placement, View
from shoal.parameter_server.transport.connection import Payload

# Messages from a worker to a shard


class PushMessage(NamedTuple):
    """A partition's gradient of one step.

    Attributes:
        gradient: flat, of the partition's length and dtype, or bytes where it is compressed.
        present: for each segment 1 where it has a gradient, else 0.
        sparse: True where most values are zeros, which need not be sent.
    """

    partition: int
    step: int
    gradient: Tensor
    present: bytes
    sparse: bool = False


class RequestMessage(NamedTuple):
    """Any other message, which is answered under its own operation, or by values, or not at all.

    Attributes: about: a partition, or a shard for a query about the shard itself.
    """

    op: Op
    about: int = 0
    step: int = 0
    payload: Payload = b""


ShardMessage = PushMessage | RequestMessage


# Messages from a shard to a worker


class ValuesMessage(NamedTuple):
    """New values of a partition.

    Attributes:
        clock: number of this worker's steps in the values.
        oldest: number of the slowest worker's steps in the values.
        stop_at: number of steps before all workers stop; 0 without a stop request.
        changed_only: True where only the blocks changed by the last step come.
    """

    partition: int
    clock: int
    oldest: int
    stop_at: int = 0
    changed_only: bool = False


class AnswerMessage(NamedTuple):
    """The answer to a query."""

    op: Op
    about: int
    payload: memoryview


class NotOwnerMessage(NamedTuple):
    """The shard does not own the partition, or does not know yet that it does.

    Attributes: op: the operation of the request.
    """

    partition: int
    op: Op


# Actions and events of a session


class ToShard(NamedTuple):
    """A message for a connected shard. Messages for one shard are sent in their order."""

    shard: int
    message: ShardMessage


class ConnectShard(NamedTuple):
    """A new shard: stay connected to its current primary from now on."""

    shard: int


class DisconnectShard(NamedTuple):
    """Another server has become the shard's primary: end the connection to the old one.

    A stopped server would never end it itself.
    """

    shard: int


class RetryLater(NamedTuple):
    """A request that found no owner: call `WorkerSession.resend` after a short time."""

    partition: int
    op: Op


class ValuesArrived(NamedTuple):
    """A partition's values are in its memory, and include `clock` steps of this worker."""

    partition: int
    clock: int


class QueryAnswered(NamedTuple):
    """The answer to a query; None where the shard has left."""

    op: Op
    about: int
    payload: memoryview | None


class ShardFailed(NamedTuple):
    """A shard is lost, so the run cannot go on."""

    error: ServerLost


SessionEvent = ValuesArrived | QueryAnswered | ShardFailed
SessionAction = ToShard | ConnectShard | DisconnectShard | RetryLater | SessionEvent


@dataclass
class PartitionRequests:
    """Requests about one partition.

    Attributes:
        push: the last push, answered or not. To free its gradient at once, on the thread of a
            connection, would make steps slower.
        queries: the queries without an answer.
    """

    push: PushMessage | None = None
    queries: dict[Op, RequestMessage] = field(default_factory=dict)

    def unanswered(self, clock: int) -> list[ShardMessage]:
        """Return the unanswered requests, if values that include `clock` steps have arrived."""
        push = self.push
        pushes = [] if push is None or push.step < clock else [push]
        return [*pushes, *self.queries.values()]


class WorkerSession:
    """One worker's requests, the shard of each, and which of them are unanswered.

    Args:
        partitions: number of partitions of the model.
        staleness: number of the slowest worker's steps that values may lack; None for any.

    Attributes:
        step: number of steps requested so far.
        stop_at: number of steps that all workers take before they stop; 0 without a stop request.
        failure: the error of the first lost shard.
        placement: the shard of each partition.
    """

    def __init__(self, partitions: int, staleness: int | None = 0) -> None:
        self.staleness = staleness
        self.step = 0
        self.stop_at = 0
        self.failure: ServerLost | None = None
        self.placement = Placement(0, (0,) * partitions)
        self._views: dict[int, View] = {}
        self._shards: set[int] = set()
        self._connected: dict[int, int | None] = {}  # shard -> the server at the other end
        self._clocks = [0] * partitions
        self._requests = [PartitionRequests() for _ in range(partitions)]
        self._shard_queries: dict[tuple[Op, int], RequestMessage] = {}
        self._step_message: RequestMessage | None = None
        self._recording = False
        # Shard -> the partition that its connection writes now, and whether these values count.
        self._incoming: dict[int, tuple[int, bool]] = {}

    # The worker

    def push(
        self, partition: int, gradient: Tensor, present: bytes, sparse: bool = False
    ) -> list[SessionAction]:
        """Send a gradient of the present step. The partition's values of this step must be here."""
        message = PushMessage(partition, self.step, gradient, present, sparse)
        self._requests[partition].push = message
        return self._to_owner(partition, [message])

    def replace_gradient(self, partition: int, gradient: Tensor) -> None:
        """Replace the tensor that was pushed last by a copy of it, for a resend."""
        requests = self._requests[partition]
        if requests.push is not None:
            requests.push = requests.push._replace(gradient=gradient)

    def request_step(self, payload: bytes) -> list[SessionAction]:
        """Request the step from all shards, later ones included. Every partition must be pushed."""
        message = RequestMessage(Op.STEP, 0, self.step, payload)
        self._step_message = message
        self.step += 1
        return [ToShard(shard, message) for shard in self._connected]

    def query(self, op: Op, payloads: Mapping[int, Payload]) -> list[SessionAction]:
        """Query several partitions. The answer is `QueryAnswered`, or `ValuesArrived` for PULL."""
        actions: list[SessionAction] = []
        for partition, payload in payloads.items():
            message = RequestMessage(op, partition, self.step, payload)
            self._requests[partition].queries[op] = message
            actions += self._to_owner(partition, [message])
        return actions

    def pull(self) -> list[SessionAction]:
        """Request the newest values of all partitions; the present values no longer count."""
        partitions = range(len(self._clocks))
        self._clocks = [-1] * len(self._clocks)
        return self.query(Op.PULL, dict.fromkeys(partitions, b""))

    def query_shard(self, shard: int, op: Op, payload: bytes = b"") -> list[SessionAction]:
        """Query the state of a shard itself."""
        if shard in self._views and self._views[shard].retired:
            return [QueryAnswered(op, shard, None)]
        message = RequestMessage(op, shard, self.step, payload)
        self._shard_queries[op, shard] = message
        return [ToShard(shard, message)] if shard in self._connected else []

    def record(self) -> list[SessionAction]:
        """Let all shards log their events from now on; later shards get this message first."""
        self._recording = True
        return [ToShard(shard, RequestMessage(Op.RECORD)) for shard in self._connected]

    def request_stop(self) -> list[SessionAction]:
        """Let all workers stop after the same step. Repeat it: it may be lost with a server."""
        if self.stop_at or 0 not in self._connected:
            return []
        return [ToShard(0, RequestMessage(Op.STOP))]

    def begin(self, step: int | None = None) -> None:
        """Treat the values in memory as those of this step, by default the present step."""
        self.step = self.step if step is None else step
        self._clocks = [self.step] * len(self._clocks)

    def missing(self, partitions: Iterable[int]) -> list[int]:
        """Return the partitions whose values of this step have not arrived."""
        return [partition for partition in partitions if self._clocks[partition] < self.step]

    def owners(self) -> list[int]:
        """Return the shards that have partitions, in order."""
        return sorted(set(self.placement.owners))

    # The coordinator

    def placement_changed(self, placement: Placement) -> list[SessionAction]:
        """Send requests about moved partitions to their new owners."""
        if placement.version <= self.placement.version:
            return []
        previous = self.placement
        self.placement = placement
        targets = (move.target for move in placement.moving.values())
        new = {0, *placement.owners, *targets} - self._shards
        self._shards |= new
        actions: list[SessionAction] = [ConnectShard(shard) for shard in sorted(new)]
        # In a missed version, a migration may have started and been cancelled. Then the owner is
        # the same, but has lost the pending requests of the partition.
        has_missed = placement.version > previous.version + 1
        for partition in range(len(self._requests)):
            if has_missed or previous.route(partition) != placement.route(partition):
                actions += self._resend_all(partition)
        return actions

    def view_changed(self, view: View) -> list[SessionAction]:
        """End the connection to a server that is no longer the shard's primary."""
        known = self._views.get(view.shard)
        if known is not None and known.epoch >= view.epoch:
            return []
        self._views[view.shard] = view
        actions: list[SessionAction] = []
        if view.shard in self._connected and self._connected[view.shard] != view.primary:
            actions.append(DisconnectShard(view.shard))
        if view.retired:
            unanswered = [op for op, shard in self._shard_queries if shard == view.shard]
            for op in unanswered:
                del self._shard_queries[op, view.shard]
                actions.append(QueryAnswered(op, view.shard, None))
        return actions

    # The network

    def connected(self, view: View) -> list[SessionAction]:
        """Send all unanswered requests to the shard's primary in `view`."""
        actions = self.view_changed(view)
        shard = view.shard
        if self._views[shard].primary != view.primary:  # another server is primary by now
            return [*actions, DisconnectShard(shard)]
        self._connected[shard] = view.primary
        if self._recording:
            actions.append(ToShard(shard, RequestMessage(Op.RECORD)))
        for partition in self.placement.owned_by(shard):
            actions += self._resend_all(partition)
        if self._step_message is not None:
            actions.append(ToShard(shard, self._step_message))
        queries = [query for (_, about), query in self._shard_queries.items() if about == shard]
        return [*actions, *(ToShard(shard, query) for query in queries)]

    def disconnected(self, shard: int) -> list[SessionAction]:
        """Record that the connection to a shard has ended."""
        self._connected.pop(shard, None)
        return self._end_incoming(shard)

    def accept(self, shard: int, values: ValuesMessage) -> bool:
        """Start to receive values. Call `receive` when they are complete, or `disconnected`.

        Returns: True to write them to the partition's memory. False: they are not needed, or
            another connection may be writing there.

        Raises: AssertionError: the values contradict the protocol.
        """
        partition, clock, oldest = values.partition, values.clock, values.oldest
        present_clock = self._clocks[partition]
        is_owner = self.placement.owners[partition] == shard
        counts = is_owner and present_clock < clock and self._writer(partition) is None
        if counts:
            limit = self.staleness
            assert limit is None or oldest >= clock - limit, (clock, oldest, limit)
            assert not values.changed_only or clock - 1 == present_clock, (clock, present_clock)
        self._incoming[shard] = partition, counts
        return counts

    def receive(
        self, shard: int, message: ValuesMessage | AnswerMessage | NotOwnerMessage
    ) -> list[SessionAction]:
        """Handle a shard's message. Values were announced by `accept` and are now in memory."""
        match message:
            case ValuesMessage():
                return self._receive_values(shard, message)
            case AnswerMessage(op, about, payload):
                if self._is_answer(op, about):
                    return [QueryAnswered(op, about, payload)]
                return []  # the answer to a request that was sent twice
            case NotOwnerMessage(partition, op):
                return [RetryLater(partition, op)]

    def resend(self, partition: int, op: Op) -> list[SessionAction]:
        """Repeat a request that found no owner, unless it is answered by now."""
        unanswered = self._requests[partition].unanswered(self._clocks[partition])
        repeated = [message for message in unanswered if _op_of(message) == op]
        return self._to_owner(partition, repeated)

    def fail(self, shard: int, reason: str) -> list[SessionAction]:
        """Report that a shard is lost for good."""
        error = ServerLost(
            f"shard {shard} of the parameter servers is lost: {reason}. The same command goes on "
            "from the last checkpoint; with replicas=2 a run survives the loss of a server."
        )
        self.failure = self.failure or error
        return [ShardFailed(error)]

    # Tables

    def _receive_values(self, shard: int, values: ValuesMessage) -> list[SessionAction]:
        partition, counts = self._incoming[shard]
        actions = self._end_incoming(shard)
        if not counts or self.placement.owners[partition] != shard:
            return actions
        self._clocks[partition] = values.clock
        self.stop_at = self.stop_at or values.stop_at
        self._requests[partition].queries.pop(Op.PULL, None)
        return [*actions, ValuesArrived(partition, values.clock)]

    def _end_incoming(self, shard: int) -> list[SessionAction]:
        """Send requests that waited while the connection to the old owner wrote the values."""
        partition, counts = self._incoming.pop(shard, (-1, False))
        if counts and self.placement.route(partition) != shard:
            return self._resend_all(partition)
        return []

    def _is_answer(self, op: Op, about: int) -> bool:
        if (op, about) in self._shard_queries:
            del self._shard_queries[op, about]
            return True
        is_partition = about < len(self._requests)
        return is_partition and self._requests[about].queries.pop(op, None) is not None

    def _resend_all(self, partition: int) -> list[SessionAction]:
        unanswered = self._requests[partition].unanswered(self._clocks[partition])
        return self._to_owner(partition, unanswered)

    def _to_owner(self, partition: int, messages: list[ShardMessage]) -> list[SessionAction]:
        """Return messages for the owner; none while it is unknown or not connected.

        None, too, while another shard's connection writes the partition's values: the new owner's
        answer would go to the same memory.
        """
        shard = self.placement.route(partition)
        if shard is None or shard not in self._connected:
            return []
        if self._writer(partition) not in (None, shard):
            return []
        return [ToShard(shard, message) for message in messages]

    def _writer(self, partition: int) -> int | None:
        """Return the shard whose connection writes the partition's values now, or None."""
        for shard, (written, counts) in self._incoming.items():
            if counts and written == partition:
                return shard
        return None


def _op_of(message: ShardMessage) -> Op:
    return message.op if isinstance(message, RequestMessage) else Op.PUSH
