"""Blocking requests of a worker to its servers: one lock around a `WorkerSession`.

backward ── push part 7 ── push part 6 ── ...          sent as they are ready
step     ── order
forward     waits for part 0 ── part 1 ── ...          values come straight into the parameters

`session.py` decides which message goes to which shard, and when to send it again. The network sends
it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.parameter_server.codec import Op, pack_partition, unpack_part
from shoal.parameter_server.events import StepRequest
from shoal.parameter_server.node.event_log import Event
from shoal.parameter_server.transport.connection import Payload
from shoal.parameter_server.worker.flat_params import FlatParams
from shoal.parameter_server.worker.session import (
    QueryAnswered,
    SessionAction,
    SessionEvent,
    ShardFailed,
    ValuesArrived,
    WorkerSession,
)
from shoal.trace.recorder import InFlight, Recorder
from shoal.watchdog.progress_word import SERVERS
from shoal.watchdog.progress_writer import now_ns, own_progress

if TYPE_CHECKING:
    from shoal.parameter_server.worker.socket_network import SocketNetwork

RECOVER_S = 60.0
"""Limit of the time that a shard may be without a primary."""


class WorkerClient:
    """One worker's requests to all shards. Use it from one thread at a time.

    Args:
        flat: this worker's memory.
        network: carries out the actions of the session; the client starts it.
        staleness: number of the slowest worker's steps that values may lack; None for any.
        recorder: records pushes and arrivals of partitions while it is on.
        awaited: ranks whose gradients a step waits for.

    Attributes:
        session: the state of all requests.
        lock: held while the session is used; notified when answers arrive.

    Raises: ServerLost: the coordinator does not answer.
    """

    def __init__(
        self,
        flat: FlatParams,
        network: SocketNetwork,
        staleness: int | None = 0,
        recorder: Recorder | None = None,
        awaited: tuple[int, ...] = (),
    ) -> None:
        self.parts, self.values = flat.parts, flat.values
        self.session = WorkerSession(len(flat.parts), staleness)
        self.lock = threading.Condition(threading.Lock())
        self._network = network
        self._recorder = recorder or Recorder()
        self._awaited = awaited
        self._flights: dict[int, InFlight] = {}
        self._wanted: set[int] = set()
        self._answers: dict[tuple[Op, int], memoryview | None] = {}
        self._collected: dict[int, dict[str, int]] = {}
        network.start(self)

    @property
    def step(self) -> int:
        """Return the number of steps requested so far."""
        return self.session.step

    @property
    def stop_at(self) -> int:
        """Return the number of steps before all workers stop; 0 without a stop request."""
        return self.session.stop_at

    def push(self, part: int, gradient: Tensor, present: bytes, sparse: bool = False) -> None:
        """Send a partition's gradient of the present step.

        The gradient must not change until `wait` has returned.

        Args: sparse: True where most values are zeros, which need not be sent.
        """
        with self.lock:
            self._await([part])
            if self._recorder.on:
                self._flights[part] = self._recorder.start(
                    f"push and pull part {part}", gradient.nbytes, f"part {part}", self._awaited
                )
            self._network.carry_out(self.session.push(part, gradient, present, sparse))

    def request_step(self, order: StepRequest) -> None:
        """Request the step from the servers, after every partition was pushed."""
        self.wait(range(len(self.parts)))
        self._request(lambda: self.session.request_step(json.dumps(order._asdict()).encode()))

    def wait(self, parts: Iterable[int]) -> None:
        """Wait for the values of the last step. Raises ServerLost."""
        with self.lock:
            for some in ([part] for part in parts) if self._recorder.on else [parts]:
                self._await(some)

    def _await(self, parts: Iterable[int]) -> None:
        """Wait until all partitions have arrived. The lock is held.

        The thread wakes once for all: one wake-up takes longer than most partitions.
        """
        missing = self.session.missing(parts)
        if not missing:
            return
        begun_ns = self._recorder.now()
        # Keep the partitions that other threads wait for. Drop those that have arrived since a wait
        # was interrupted.
        self._wanted = set(self.session.missing((*self._wanted, *missing)))
        progress, start_ns = own_progress(), now_ns()
        with progress.message_wait(SERVERS):
            while self._wanted:
                if self.session.failure is not None:
                    raise self.session.failure
                self.lock.wait()
        progress.add_waited(now_ns() - start_ns)
        for part in self._flights.keys() & set(missing):
            self._recorder.blocked(self._flights[part], begun_ns)

    def request_stop(self) -> None:
        """Let all workers stop after the same step, which none of them has reached."""
        self._request(self.session.request_stop)

    def pull(self) -> None:
        """Wait for the newest values of all partitions.

        Every worker must have waited for its own values before.
        """
        self._request(self.session.pull)
        self.wait(range(len(self.parts)))

    def squared_norm(self) -> float:
        """Return the squared norm of all gradients of the present step, over all workers.

        It waits until every worker has pushed.
        """
        answers = self._ask(Op.NORM, dict.fromkeys(range(len(self.parts)), b""))
        return sum(float.fromhex(bytes(answers[part.number]).decode()) for part in self.parts)

    def gradient(self, part: int) -> tuple[Tensor, bytes]:
        """Return a partition's gradient, summed over all workers, and the mask of its segments."""
        payload = self._ask(Op.GRADIENT, {part: b""})[part]
        segments = len(self.parts[part].segments)
        values = torch.frombuffer(bytearray(payload[segments:]), dtype=self.parts[part].dtype)
        return values, bytes(payload[:segments])

    def load(self, states: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Load this worker's `values` and these optimizer states into the servers, at this step."""
        for part, state in zip(self.parts, states, strict=True):
            payload = pack_partition(self.values[part.number], state, {})
            self._ask(Op.LOAD, {part.number: payload})
        self.mark_current()

    def mark_current(self) -> None:
        """Treat the values in memory as those of the servers."""
        with self.lock:
            self.session.begin()

    def state(self, part: int) -> list[dict[str, Any]]:
        """Return the optimizer's state of each segment of a partition."""
        return unpack_part(self._ask(Op.STATE, {part: b""})[part])[1]

    def stats(self, limit_s: float = RECOVER_S) -> list[dict[str, Any]]:
        """Return the figures of each shard's primary, without shards that have left."""
        shards = self.session.owners()
        for shard in shards:
            self._ask_shard(shard, Op.STATS)
        answers = [self._await_answer(Op.STATS, shard, limit_s) for shard in shards]
        return [json.loads(bytes(answer)) for answer in answers if answer is not None]

    def record(self) -> None:
        """Let all shards, later ones included, log each update and each sent value.

        Every worker must call it before its first push.
        """
        self._request(self.session.record)

    def history(self) -> list[Event]:
        """Return the event logs of shards since the last call. Only one worker may call it.

        If a shard leaves or is replaced, the events since the last call are lost.
        """
        shards = self.session.owners()
        events = list[Event]()
        while shards:
            for shard in shards:
                known = self._collected.setdefault(shard, {"server": -1, "first": 0})
                self._ask_shard(shard, Op.HISTORY, json.dumps(known).encode())
            asked, shards = shards, []
            for shard in asked:
                payload = self._await_answer(Op.HISTORY, shard, RECOVER_S)
                if payload is not None:
                    answer = json.loads(bytes(payload))
                    events += [Event(*event) for event in answer["events"]]
                    first = answer["first"] + len(answer["events"])
                    self._collected[shard] = {"server": answer["server"], "first": first}
                    shards += [shard] if answer["more"] else []
        return events

    def close(self, limit_s: float = 5.0) -> None:
        """Disconnect for good, and sign off at the coordinator."""
        self._network.close(limit_s)

    def handle(self, event: SessionEvent) -> None:
        """Handle an event of the session. The lock is held."""
        match event:
            case ValuesArrived(partition):
                if partition in self._flights:
                    self._flights[partition].finish()
                if partition in self._wanted and not self.session.missing([partition]):
                    self._wanted.remove(partition)
                    if not self._wanted:
                        self.lock.notify_all()
            case QueryAnswered(op, about, payload):
                self._answers[op, about] = payload
                self.lock.notify_all()
            case ShardFailed():
                self.lock.notify_all()

    def _request(self, build_actions: Callable[[], list[SessionAction]]) -> None:
        with self.lock:
            self._network.carry_out(build_actions())

    def _ask(self, op: Op, payloads: Mapping[int, Payload]) -> dict[int, memoryview]:
        """Query several partitions at once, and wait for all answers. Raises ServerLost."""
        self._request(lambda: self.session.query(op, payloads))
        answers = {part: self._await_answer(op, part) for part in payloads}
        # A query about a partition always has an answer; the filter is for the type checker.
        return {part: answer for part, answer in answers.items() if answer is not None}

    def _ask_shard(self, shard: int, op: Op, payload: bytes = b"") -> None:
        self._request(lambda: self.session.query_shard(shard, op, payload))

    def _await_answer(self, op: Op, about: int, limit_s: float | None = None) -> memoryview | None:
        """Wait for an answer. Return None after the limit, or if the shard has left.

        Raises ServerLost.
        """
        key, session = (op, about), self.session
        with self.lock, own_progress().message_wait(SERVERS):
            self.lock.wait_for(lambda: key in self._answers or session.failure is not None, limit_s)
            if key not in self._answers and session.failure is not None:
                raise session.failure
            return self._answers.pop(key, None)
