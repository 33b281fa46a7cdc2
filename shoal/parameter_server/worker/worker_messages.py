"""Messages between a worker and its shards as plain values, and what a `WorkerSession` asks for.

    the worker's request ──> WorkerSession ──> ToShard(shard, message)     the network sends it
    a shard's message ─────> WorkerSession ──> ValuesArrived, ...          the owner of the session
                                       └─────> ConnectShard, ...           the network

How they stand in a frame is in `shard_connection.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from shoal.errors import ServerLost
from shoal.parameter_server.codec import Op
from shoal.parameter_server.transport.connection import Payload

# What a worker sends to a shard


class PushMessage(NamedTuple):
    """A partition's gradient of one step.

    Attributes:
        gradient: flat, of the partition's length and dtype, or bytes where it is compressed.
        present: for each segment 1 where it has a gradient, else 0.
        sparse: most of it is zeros, which need not be sent.
    """

    partition: int
    step: int
    gradient: Tensor
    present: bytes
    sparse: bool = False


class StepMessage(NamedTuple):
    """The request to take a step, as `pack_order` packs it."""

    step: int
    payload: bytes


class QueryMessage(NamedTuple):
    """A request that is answered under its own operation.

    Attributes: about: the number of a partition, or of a shard for a query about the shard itself.
    """

    op: Op
    about: int
    step: int
    payload: Payload


class NoticeMessage(NamedTuple):
    """A message of its operation alone, without an answer."""

    op: Op


ShardMessage = PushMessage | StepMessage | QueryMessage | NoticeMessage


# What a shard sends to a worker


class ValuesMessage(NamedTuple):
    """New values of a partition.

    Attributes:
        clock: steps of this worker that they include.
        oldest: steps of the slowest worker that they include.
        stop_at: how many steps all workers take before they stop; 0 where nobody has asked for it.
        changed_only: only those blocks come that the last step has changed.
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
    """The shard does not answer for a partition, or does not know yet that it is to.

    Attributes: op: of what was asked in vain.
    """

    partition: int
    op: Op


# What a session asks for


class ToShard(NamedTuple):
    """A message for a connected shard. Messages for one shard are sent in their order."""

    shard: int
    message: ShardMessage


class ConnectShard(NamedTuple):
    """A shard that is new: stay connected to whoever is its primary, from now on."""

    shard: int


class DisconnectShard(NamedTuple):
    """Another server has become the shard's primary: end the connection to the old one.

    A server that was stopped never ends it itself.
    """

    shard: int


class RetryLater(NamedTuple):
    """A request that found no owner: call `WorkerSession.resend` after a short time."""

    partition: int
    op: Op


class ValuesArrived(NamedTuple):
    """A partition's values are in its memory, and include so many steps of this worker."""

    partition: int
    clock: int


class QueryAnswered(NamedTuple):
    """A query has its answer; None where the shard has left and answers no more."""

    op: Op
    about: int
    payload: memoryview | None


class ShardFailed(NamedTuple):
    """A shard is lost, and with it the run."""

    error: ServerLost


SessionEvent = ValuesArrived | QueryAnswered | ShardFailed
SessionAction = ToShard | ConnectShard | DisconnectShard | RetryLater | SessionEvent
