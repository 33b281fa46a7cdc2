"""A `Shard` and a `WorkerSession` side by side: a host's workers act as one worker. No I/O.

      worker 0 ── push ──┐                          ┌── sum of the partition ──> servers
      worker 1 ── push ──┴─ Shard ── Aggregator ── WorkerSession
      workers  <── values ── Shard <──────────────── └── values <── servers

To its workers the aggregator is a server with all partitions. To the servers it is a worker that
computes nothing. Its shard sums gradients and answers like any other shard, but takes no optimizer
step: its values are loaded from the servers instead. Steps are synchronous only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.parameter_server.codec import Op, unpack_order, unpack_part
from shoal.parameter_server.events import GradNormResponse, GradResponse, NotOwner, Outgoing
from shoal.parameter_server.node.shard import Shard
from shoal.parameter_server.worker.session import WorkerSession
from shoal.parameter_server.worker.worker_messages import (
    QueryAnswered,
    SessionAction,
    SessionEvent,
    ValuesArrived,
)

FORWARD = -1
"""The worker id under which the aggregator asks its own shard for sums; no worker has it."""


class Load(NamedTuple):
    """Initial values of a partition, from a worker."""

    worker: int
    values: Tensor
    segments: int
    step: int


class Aggregator:
    """Send sums of the workers' pushes to the servers, and the servers' values to the workers.

    Args:
        shard: serves the workers; the session receives values into its memory.
        session: the session with the servers.
        sum_memory: returns the memory for a partition's sum.
        loads: True for the one aggregator that loads the initial values into the servers.
    """

    def __init__(
        self,
        shard: Shard,
        session: WorkerSession,
        sum_memory: Callable[[int], Tensor],
        loads: bool,
    ) -> None:
        self.shard = shard
        self.session = session
        self._sum_memory = sum_memory
        self._loads = loads
        self._loading: dict[int, Load] = {}
        self._steps: dict[int, tuple[int, bytes]] = {}  # the last step request of each worker
        self._forwarded: set[int] = set()  # partitions whose sums of this step were sent
        self._queries: list[tuple[Op, int, int]] = []  # wait until all sums are sent
        self._asking: dict[tuple[Op, int], list[int]] = {}  # workers that wait for an answer

    # The workers

    def load(
        self, worker: int, partition: int, payload: bytes, step: int
    ) -> list[Outgoing | SessionAction]:
        """Load initial values, into the servers first."""
        if partition not in self.shard.owned:
            raise NotOwner(partition)
        values, state, _ = unpack_part(memoryview(payload))
        load = Load(worker, values, len(state), step)
        self.session.begin(step)
        if not self._loads:
            return [*self._loaded(partition, load)]
        self._loading[partition] = load
        return [*self.session.query(Op.LOAD, {partition: payload})]

    def push(
        self,
        worker: int,
        step: int,
        partition: int,
        gradient: Tensor,
        present: bytes,
        sparse: bool = False,
    ) -> list[Outgoing | SessionAction]:
        """Add a worker's gradient; forward the sum when it is complete."""
        out = self.shard.push(worker, step, partition, gradient, present, sparse)
        return [*self._forward_sums(out), *self._forward_rest()]

    def request_step(
        self, worker: int, step: int, payload: bytes
    ) -> list[Outgoing | SessionAction]:
        """Forward the step when every worker has requested it. Raises Refused: it is no request."""
        unpack_order(memoryview(payload))
        self._steps[worker] = step, payload
        return self._forward_rest()

    def query(
        self, worker: int, step: int, op: Op, partition: int
    ) -> list[Outgoing | SessionAction]:
        """Query the servers about the sum over all hosts in this step: NORM or GRADIENT."""
        self.shard.require_partition(partition)
        if step == self.session.step:
            self._queries.append((op, partition, worker))
        return self._forward_rest()

    # The servers

    def receive(self, event: SessionEvent) -> list[Outgoing]:
        """Handle an event of the session; return messages for the workers."""
        match event:
            case ValuesArrived(partition, clock):
                return self._distribute(partition, clock)
            case QueryAnswered(Op.LOAD, partition):
                return self._loaded(partition, self._loading.pop(partition))
            case QueryAnswered(op, partition, payload) if payload is not None:
                workers = self._asking.pop((op, partition))
                return [self._answer(worker, op, partition, payload) for worker in workers]
        raise AssertionError(event)

    def _loaded(self, partition: int, load: Load) -> list[Outgoing]:
        state = _no_state(load.segments)
        out = self.shard.load(load.worker, partition, load.values, state, load.step)
        self._begin_sum(partition)
        return out

    def _distribute(self, partition: int, clock: int) -> list[Outgoing]:
        """Let the shard answer every worker with the values that are already in its memory."""
        held = self.shard.held[partition]
        state = _no_state(len(held.part.segments))
        self.shard.load(FORWARD, partition, held.values, state, clock)
        self._begin_sum(partition)
        return [out for worker in self.shard.workers for out in self.shard.pull(worker, partition)]

    def _begin_sum(self, partition: int) -> None:
        self.shard.sums[partition].memory = self._sum_memory(partition)
        self.shard.query_gradient(
            FORWARD, self.shard.held[partition].clock, partition, as_tensor=True
        )
        self._forwarded.discard(partition)

    # Messages that go on to the servers

    def _forward_sums(self, out: Iterable[Outgoing]) -> list[Outgoing | SessionAction]:
        actions: list[Outgoing | SessionAction] = []
        for message in out:
            if isinstance(message, GradResponse) and message.worker == FORWARD:
                partition, sparse = message.part, self.shard.sums[message.part].sparse
                self._forwarded.add(partition)
                total, present = message.values, message.grad_mask
                actions += self.session.push(partition, total, present, sparse)
            else:
                actions.append(message)
        return actions

    def _forward_rest(self) -> list[Outgoing | SessionAction]:
        """Forward queries and the step when all sums are sent: they must not delay a sum."""
        if not self.shard.owned <= self._forwarded:
            return []
        actions: list[Outgoing | SessionAction] = []
        queries = self._queries
        self._queries = []
        for op, partition, worker in queries:
            waiting = self._asking.setdefault((op, partition), [])
            waiting.append(worker)
            if len(waiting) == 1:
                actions += self.session.query(op, {partition: b""})
        workers = self.shard.workers
        step = self.session.step
        if all(self._steps.get(worker, (-1,))[0] == step for worker in workers):
            actions += self.session.request_step(self._steps[workers[0]][1])
        return actions

    def _answer(self, worker: int, op: Op, partition: int, payload: memoryview) -> Outgoing:
        if op == Op.NORM:
            return GradNormResponse(worker, partition, float.fromhex(bytes(payload).decode()))
        part = self.shard.parts[partition]
        present = bytes(payload[: len(part.segments)])
        values = torch.frombuffer(bytearray(payload[len(present) :]), dtype=part.dtype)
        return GradResponse(worker, partition, values, present)


def _no_state(segments: int) -> list[Mapping[str, Any]]:
    return [{} for _ in range(segments)]
