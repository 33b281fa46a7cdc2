"""Calls that wait, by which a worker asks its servers: one lock around a `WorkerSession`.

backward ── push part 7 ── push part 6 ── ...          sent as they are ready
step     ── order
forward     waits for part 0 ── part 1 ── ...          values come straight into the parameters

`worker_session.py` decides what is sent to whom, and sent again; the network carries it.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.parameter_server.codec import Op, pack_order, pack_partition, unpack_part
from shoal.parameter_server.coordinator.coordinator import Address
from shoal.parameter_server.events import StepRequest
from shoal.parameter_server.node.event_log import Event
from shoal.parameter_server.node.shared_values import read_offsets
from shoal.parameter_server.transport.connection import Payload
from shoal.parameter_server.transport.settings import Transport
from shoal.parameter_server.worker.flat_params import FlatParams
from shoal.parameter_server.worker.push_trace import PushTrace
from shoal.parameter_server.worker.session import WorkerSession
from shoal.parameter_server.worker.shard_connection import RECOVER_S, WorkerMemory
from shoal.parameter_server.worker.socket_network import SocketNetwork
from shoal.parameter_server.worker.worker_messages import (
    QueryAnswered,
    SessionAction,
    SessionEvent,
    ShardFailed,
    ValuesArrived,
)
from shoal.parameter_server.worker.worker_network import WorkerNetwork


def connect_to_servers(
    worker: int,
    flat: FlatParams,
    arbiter: Address,
    transport: Transport,
    *,
    staleness: int | None = 0,
    shares: bool = True,
    trace: PushTrace | None = None,
) -> WorkerClient:
    """Return a client with connections to all shards.

    Args:
        worker: its number among those that push to the same servers.
        flat: this worker's memory: values are written there as they come.
        arbiter: the address at which it listens.
        transport: settings of the job.
        staleness: how many steps values may lack of the slowest worker's; None for any.
        shares: whether servers of this machine read gradients in this worker's memory.
        trace: is told when partitions go and come.

    Raises: ServerLost: the arbiter says nothing.
    """
    read_at = read_offsets(flat.parts, worker, staleness)
    memory = WorkerMemory(flat.values, read_at, flat.lent, flat.lent_at if shares else ())
    network = SocketNetwork(worker, arbiter, memory, transport.for_parts(flat.parts))
    return WorkerClient(flat, network, staleness, trace)


class WorkerClient:
    """One worker's requests to all shards. Use it from one thread at a time.

    Args:
        flat: this worker's memory.
        network: what requests travel by; it is started.
        staleness: how many steps values may lack of the slowest worker's; None for any.
        trace: is told when partitions go and come.

    Attributes:
        session: everything about what was asked and what was answered.
        lock: is held while the session is used, and tells of what has come.

    Raises: ServerLost: the arbiter says nothing.
    """

    def __init__(
        self,
        flat: FlatParams,
        network: WorkerNetwork,
        staleness: int | None = 0,
        trace: PushTrace | None = None,
    ) -> None:
        self.parts, self.values = flat.parts, flat.values
        self.session = WorkerSession(len(flat.parts), staleness)
        self.lock = threading.Condition(threading.Lock())
        self._network = network
        self._trace = trace or PushTrace()
        self._wanted: set[int] = set()
        self._answers: dict[tuple[Op, int], memoryview | None] = {}
        self._collected: dict[int, dict[str, int]] = {}
        network.start(self)

    @property
    def step(self) -> int:
        """Steps that were ordered so far."""
        return self.session.step

    @property
    def stop_at(self) -> int:
        """Steps that all workers take before they stop; 0 while none has asked for it."""
        return self.session.stop_at

    def push(self, part: int, gradient: Tensor, present: bytes, sparse: bool = False) -> None:
        """Send a part's gradient of the step that is under way.

        It must not change until `wait` has returned.

        Args: sparse: most of it is zeros, which need not be sent.
        """
        with self.lock:
            self._await([part])
            self._trace.pushed(part, gradient.nbytes)
            self._network.carry_out(self.session.push(part, gradient, present, sparse))

    def request_step(self, order: StepRequest) -> None:
        """Have the servers take the step, now that every part was pushed."""
        self.wait(range(len(self.parts)))
        self._request(lambda: self.session.request_step(pack_order(order)))

    def wait(self, parts: Iterable[int]) -> None:
        """Wait for the values of the last step. Raises ServerLost."""
        with self.lock:
            for some in ([part] for part in parts) if self._trace.on else [parts]:
                self._await(some)

    def _await(self, parts: Iterable[int]) -> None:
        """Sleep until all of them are here, with the lock.

        To be woken for each takes longer than most take to come.
        """
        missing = self.session.missing(parts)
        if not missing:
            return
        begun_ns = self._trace.now()
        # With what another thread waits for. What an interrupted one has waited for may be here.
        self._wanted = set(self.session.missing((*self._wanted, *missing)))
        while self._wanted:
            if self.session.failure is not None:
                raise self.session.failure
            self.lock.wait()
        for part in missing:
            self._trace.waited(part, begun_ns)

    def request_stop(self) -> None:
        """Have all workers stop after the same step, which none of them has reached."""
        self._request(self.session.request_stop)

    def pull(self) -> None:
        """Wait for the newest values of all parts.

        Every worker must have waited for its own before.
        """
        self._request(self.session.pull)
        self.wait(range(len(self.parts)))

    def squared_norm(self) -> float:
        """Squared norm of all gradients of the step that is under way, over all workers.

        Every worker must have pushed or will.
        """
        answers = self._ask(Op.NORM, dict.fromkeys(range(len(self.parts)), b""))
        return sum(float.fromhex(bytes(answers[part.number]).decode()) for part in self.parts)

    def gradient(self, part: int) -> tuple[Tensor, bytes]:
        """A part's gradient, summed over all workers, and which of its segments have one."""
        payload = self._ask(Op.GRADIENT, {part: b""})[part]
        segments = len(self.parts[part].segments)
        numbers = torch.frombuffer(bytearray(payload[segments:]), dtype=self.parts[part].dtype)
        return numbers, bytes(payload[:segments])

    def load(self, states: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Have the servers begin at this worker's `values`, with these optimizer states.

        They begin at this worker's step.
        """
        taken = dict[int, list[float]]()
        for part, state in zip(self.parts, states, strict=True):
            owner = self.session.placement.owners[part.number]
            begun_s = time.perf_counter()
            payload = pack_partition(self.values[part.number], list(state), {})
            self._ask(Op.LOAD, {part.number: payload})
            taken.setdefault(owner, []).append(len(payload) / (time.perf_counter() - begun_s))
        self.mark_current()
        speeds = {shard: statistics.median(rates) for shard, rates in taken.items()}
        self._network.report_speeds(speeds)

    def mark_current(self) -> None:
        """Take the values that are here for those of the servers."""
        with self.lock:
            self.session.begin()

    def state(self, part: int) -> list[dict[str, Any]]:
        """The optimizer's state of each segment of a part."""
        return unpack_part(self._ask(Op.STATE, {part: b""})[part])[1]

    def stats(self, limit_s: float = RECOVER_S) -> list[dict[str, Any]]:
        """Return what each shard's primary tells of itself; a shard that has left tells nothing."""
        shards = self.session.owners()
        for shard in shards:
            self._ask_shard(shard, Op.STATS)
        answers = [self._await_answer(Op.STATS, shard, limit_s) for shard in shards]
        return [json.loads(bytes(answer)) for answer in answers if answer is not None]

    def record(self) -> None:
        """Have all shards, later ones too, note what they apply and give out.

        For every worker, before it pushes.
        """
        self._request(self.session.record)

    def history(self, limit_s: float = RECOVER_S) -> list[Event]:
        """Return the notes of shards since the last call. Always the same worker calls it.

        A shard that leaves, or is replaced, takes with it what was not asked for: its notes are
        missing here.
        """
        shards, found = self.session.owners(), list[Event]()
        while shards:
            for shard in shards:
                known = self._collected.setdefault(shard, {"server": -1, "first": 0})
                self._ask_shard(shard, Op.HISTORY, json.dumps(known).encode())
            shards = [shard for shard in shards if self._read_history_chunk(shard, found, limit_s)]
        return found

    def _read_history_chunk(self, shard: int, found: list[Event], limit_s: float) -> bool:
        """Add a piece of a shard's notes; whether there are more."""
        payload = self._await_answer(Op.HISTORY, shard, limit_s)
        if payload is None:
            return False
        answer = json.loads(bytes(payload))
        found += [Event(*event) for event in answer["events"]]
        first = answer["first"] + len(answer["events"])
        self._collected[shard] = {"server": answer["server"], "first": first}
        return bool(answer["more"])

    def close(self, limit_s: float = 5.0) -> None:
        """Hang up, for good: the arbiter is told."""
        self._network.close(limit_s)

    def handle(self, event: SessionEvent) -> None:
        """Take an event of the session. The lock is held."""
        match event:
            case ValuesArrived(partition):
                self._trace.arrived(partition)
                if partition in self._wanted and not self.session.missing([partition]):
                    self._wanted.remove(partition)
                    if not self._wanted:
                        self.lock.notify_all()
            case QueryAnswered(op, about, payload):
                self._answers[op, about] = payload
                self.lock.notify_all()
            case ShardFailed():
                self.lock.notify_all()

    def _request(self, ask: Callable[[], list[SessionAction]]) -> None:
        with self.lock:
            self._network.carry_out(ask())

    def _ask(self, op: Op, payloads: Mapping[int, Payload]) -> dict[int, memoryview]:
        """Ask about several parts at once, and wait for all answers. Raises ServerLost."""
        self._request(lambda: self.session.query(op, payloads))
        found = {part: self._await_answer(op, part) for part in payloads}
        return {part: answer for part, answer in found.items() if answer is not None}  # all of them

    def _ask_shard(self, shard: int, op: Op, payload: bytes = b"") -> None:
        self._request(lambda: self.session.query_shard(shard, op, payload))

    def _await_answer(self, op: Op, about: int, limit_s: float | None = None) -> memoryview | None:
        """Wait for an answer; None where that takes too long, or never comes. Raises ServerLost."""
        key, session = (op, about), self.session
        with self.lock:
            self.lock.wait_for(lambda: key in self._answers or session.failure is not None, limit_s)
            if key not in self._answers and session.failure is not None:
                raise session.failure
            return self._answers.pop(key, None)
