"""All servers of a replayed run, inside this process: a network without connections.

Client ── WorkerSession ── actions ──> ReplayedServers ── stepped() ──> pushes of the step
Client <── WorkerSession <── values ── ReplayedServers <── take() ───── values for the step
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from shoal.comm.compression import Compression
from shoal.errors import UsageError
from shoal.parameter_server.codec import Op, pack_partition, unpack_order, unpack_part
from shoal.parameter_server.coordinator.coordinator import View
from shoal.parameter_server.coordinator.placement import Placement
from shoal.parameter_server.events import StepRequest
from shoal.parameter_server.node.partition_state import PartitionState
from shoal.parameter_server.optimizer_spec import OptimizerSpec
from shoal.parameter_server.replay.recorded_order import ReplayStep
from shoal.parameter_server.worker.flat_params import FlatParams
from shoal.parameter_server.worker.worker_messages import (
    AnswerMessage,
    ConnectShard,
    DisconnectShard,
    NoticeMessage,
    PushMessage,
    QueryAnswered,
    QueryMessage,
    RetryLater,
    SessionAction,
    ShardFailed,
    ShardMessage,
    StepMessage,
    ToShard,
    ValuesArrived,
    ValuesMessage,
)
from shoal.parameter_server.worker.worker_network import SessionOwner


class ReplayedServers:
    """One worker's network in a replay: store its pushes, and deliver the values of the replay.

    Args:
        held: the partitions, shared by all workers; the first worker fills the list.
        compression: of the pushed gradients.
    """

    owner: SessionOwner

    def __init__(
        self,
        flat: FlatParams,
        recipe: OptimizerSpec,
        held: list[PartitionState],
        compression: Compression | None,
    ) -> None:
        self.parts = flat.parts
        self.values = flat.values
        self.held = held
        self._compression = compression
        self._pushed: dict[int, tuple[Tensor, bytes]] = {}
        self._order: StepRequest | None = None
        if not held:
            held += [PartitionState(part, recipe) for part in flat.parts]

    # For the replay

    def take(self, part: int, values: Tensor) -> None:
        """Deliver the recorded values of a partition to this worker."""
        self.values[part].copy_(values)

    def stepped(self) -> ReplayStep:
        """Return the pushes and the request of the last step."""
        if self._order is None or len(self._pushed) < len(self.parts):
            raise UsageError("a step that is replayed has pushed nothing, or not everything")
        stepped = ReplayStep(self._pushed, self._order)
        self._pushed = {}
        self._order = None
        return stepped

    # For the client

    def start(self, owner: SessionOwner) -> None:
        """Act as the only shard, which owns all partitions."""
        self.owner = owner
        self.carry_out(owner.session.placement_changed(Placement(1, (0,) * len(self.parts))))
        self.carry_out(owner.session.connected(View(0, epoch=1, primary=0)))

    def carry_out(self, actions: Iterable[SessionAction]) -> None:
        for action in actions:
            match action:
                case ToShard(_, message):
                    self._receive(message)
                case ValuesArrived() | QueryAnswered() | ShardFailed():
                    self.owner.handle(action)
                case ConnectShard() | DisconnectShard() | RetryLater():
                    pass  # the only shard is always connected

    def report_speeds(self, bytes_per_s: Mapping[int, float]) -> None:
        """Ignore the speeds: there is one shard only."""

    def close(self, limit_s: float) -> None:
        """Do nothing: there is no connection."""

    def _receive(self, message: ShardMessage) -> None:
        session = self.owner.session
        match message:
            case PushMessage(part, _, gradient, present):
                self._pushed[part] = self._decoded(part, gradient), present
            case StepMessage(_, payload):
                self._order = unpack_order(memoryview(payload))
                session.begin()  # `take` delivers the values of the next step before it starts
            case QueryMessage(Op.PULL, part):
                self.values[part].copy_(self.held[part].values)
                answer = ValuesMessage(part, session.step, session.step)
                session.accept(0, answer)
                self.carry_out(session.receive(0, answer))
            case QueryMessage(Op.LOAD, part, _, payload) if isinstance(payload, bytes):
                values, state, _ = unpack_part(memoryview(payload))
                self.held[part].load(values, list(state), 0)
                self._answer(Op.LOAD, part, b"")
            case QueryMessage(Op.STATE, part):
                held = self.held[part]
                self._answer(Op.STATE, part, pack_partition(held.values, list(held.state()), {}))
            case QueryMessage(op) | NoticeMessage(op):
                raise UsageError(f"a run that is replayed has no servers to ask for {op.name}")

    def _decoded(self, part: int, gradient: Tensor) -> Tensor:
        layout, packed = self.parts[part], self._compression
        return gradient if packed is None else packed.decode(gradient, layout.length, layout.dtype)

    def _answer(self, op: Op, part: int, payload: bytes) -> None:
        answer = AnswerMessage(op, part, memoryview(payload))
        self.carry_out(self.owner.session.receive(0, answer))
