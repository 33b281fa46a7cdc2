"""Messages between a worker and its shards as plain values, and the actions of a `WorkerSession`.

    the worker's request ──> WorkerSession ──> ToShard(shard, message)     the network sends it
    a shard's message ─────> WorkerSession ──> ValuesArrived, ...          the owner of the session
                                       └─────> ConnectShard, ...           the network

`socket_network.py` writes them to frames and reads them from frames.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from shoal.errors import ServerLost
from shoal.parameter_server.codec import Op
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
