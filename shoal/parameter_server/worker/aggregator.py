"""A shard and a worker's session side by side: a machine's workers as one worker. No I/O.

      worker 0 ── push ──┐                          ┌── sum of the partition ──> servers
      worker 1 ── push ──┴─ Shard ── Aggregator ── WorkerSession
      workers  <── values ── Shard <──────────────── └── values <── servers

To its workers it is a server that holds everything; to the servers it is a worker that never
computes. The shard adds up and answers as any other, but it is never told to take a step: its
values are loaded from the servers instead. Synchronous steps only.
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
"""The number under which the aggregator asks its own shard for sums, which no worker has."""


class Load(NamedTuple):
    """Numbers that a worker begins with."""

    worker: int
    values: Tensor
    segments: int
    step: int


class Aggregator:
    """Sums of the workers' pushes go to the servers, and the servers' values to the workers.

    Args:
        shard: for the workers; its values are where the session's are written.
        session: with the servers.
        sum_memory: gives the memory for a partition's sum.
        loads: it is this one of all aggregators that gives the servers their first numbers.
    """

    def __init__(
        self,
        shard: Shard,
        session: WorkerSession,
        sum_memory: Callable[[int], Tensor],
        loads: bool,
    ) -> None:
        self.shard, self.session = shard, session
        self._sum_memory, self._loads = sum_memory, loads
        self._loading: dict[int, Load] = {}
        self._steps: dict[int, tuple[int, bytes]] = {}  # what each worker has last requested
        self._forwarded: set[int] = set()  # partitions whose sums of this step are on their way
        self._queries: list[tuple[Op, int, int]] = []  # for when all sums are on their way
        self._asking: dict[tuple[Op, int], list[int]] = {}  # workers that wait for an answer

    # The workers

    def load(
        self, worker: int, partition: int, payload: bytes, step: int
    ) -> list[Outgoing | SessionAction]:
        """Begin at these numbers, which the servers are given first."""
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
        """Ask the servers about the sum over all machines in this step: NORM or GRADIENT."""
        self.shard.require_partition(partition)
        if step == self.session.step:
            self._queries.append((op, partition, worker))
        return self._forward_rest()

    # The servers

    def receive(self, event: SessionEvent) -> list[Outgoing]:
        """Take what has come of the session."""
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
        """Have the shard answer every worker with values that are in its memory already."""
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

    # What goes on to the servers

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
        """Queries and the step, once all sums are on their way: they must not hold up a sum."""
        if not self.shard.owned <= self._forwarded:
            return []
        actions: list[Outgoing | SessionAction] = []
        queries, self._queries = self._queries, []
        for op, partition, worker in queries:
            waiting = self._asking.setdefault((op, partition), [])
            waiting.append(worker)
            if len(waiting) == 1:
                actions += self.session.query(op, {partition: b""})
        workers, step = self.shard.workers, self.session.step
        if all(self._steps.get(worker, (-1,))[0] == step for worker in workers):
            actions += self.session.request_step(self._steps[workers[0]][1])
        return actions

    def _answer(self, worker: int, op: Op, partition: int, payload: memoryview) -> Outgoing:
        if op == Op.NORM:
            return GradNormResponse(worker, partition, float.fromhex(bytes(payload).decode()))
        part = self.shard.parts[partition]
        present = bytes(payload[: len(part.segments)])
        numbers = torch.frombuffer(bytearray(payload[len(present) :]), dtype=part.dtype)
        return GradResponse(worker, partition, numbers, present)


def _no_state(segments: int) -> list[Mapping[str, Any]]:
    return [{} for _ in range(segments)]
