"""The primary of a shard as a pure state machine: messages in, messages out. It has no sockets, no
threads and no wall clock.

    synchronous (staleness 0)                       asynchronous
      push of worker 0 ┐                              push of worker w, and its step request
      push of worker 1 ┴─ sum, by worker id           │ apply at once: each push is a step
      all step requests ─┴─ apply ── values to all    └ values to w, once no worker is more than
                                                        `staleness` steps behind

Every push is applied exactly once. A partition counts the steps that it includes, of each worker
where steps are asynchronous. A push that is resent, because its answer was lost, is answered and
not applied again. The window is one step: a worker waits for all values of a step before it pushes
the next one.

Partitions migrate, and backups copy each update before a worker is answered: see
`shard_replica.py`. A step request goes to every shard, so a partition is stepped under the request
that its present shard has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from shoal.parameter_server.events import (
    GradientUpdate,
    LoadDone,
    Outgoing,
    ProtocolViolation,
    PullResponse,
    ReplicateUpdate,
    StepRequest,
)
from shoal.parameter_server.node.event_log import Event, EventLog
from shoal.parameter_server.node.partition_state import GradientQuery, GradientSum, Push, respond
from shoal.parameter_server.node.shard_replica import ShardReplica
from shoal.parameter_server.optimizer_spec import OptimizerSpec
from shoal.parameter_server.partitioning import Partition
from shoal.parameter_server.sparse_blocks import changed


class Shard(ShardReplica):
    """The partitions of one server, and the requests of workers for them.

    Args:
        parts, recipe, workers, owned, memory: see `ShardReplica`.
        staleness: steps that a worker may be ahead of the slowest; 0 for synchronous steps, None
            for any number.
        snapshot: copies a partition's values for one worker, where they may change before the
            worker has read them. Its arguments are the worker, the partition's number, the values.

    Attributes:
        step_requests: worker -> its newest step, and the settings for it.
        staleness_counts: staleness -> number of reads with it.
        history: updates and reads since `record`; None before.
    """

    def __init__(
        self,
        parts: Sequence[Partition],
        recipe: OptimizerSpec,
        workers: Iterable[int],
        staleness: int | None = 0,
        *,
        owned: Iterable[int] | None = None,
        memory: Callable[[Partition], Tensor | None] = lambda _: None,
        snapshot: Callable[[int, int, Tensor], Tensor] = lambda _worker, _part, values: (
            values.clone()
        ),
    ) -> None:
        super().__init__(parts, recipe, workers, owned, memory)
        self.staleness = staleness
        self._snapshot = snapshot
        self.step_requests: dict[int, tuple[int, StepRequest]] = {}
        self.staleness_counts: Counter[int] = Counter()
        self.history: EventLog | None = None

    def record(self) -> None:
        """Start to log updates and reads, unless the log has started."""
        self.history = self.history or EventLog()

    def _log_event(self, event: Event) -> None:
        if self.history is not None:
            self.history.add(event)

    def all_workers_read(self, done: Mapping[int, int]) -> bool:
        """Return whether each worker has computed with values that include its `done` steps.

        A worker that requests a step has finished its backward pass, so it has read all values.
        """
        return all(
            self.step_requests.get(worker, (-1,))[0] >= steps for worker, steps in done.items()
        )

    # Requests of workers

    def load(
        self,
        worker: int,
        partition: int,
        values: Tensor,
        state: list[Mapping[str, Any]],
        clock: int,
    ) -> list[Outgoing]:
        """Start a partition from a worker's values, with `clock` steps already taken.

        The worker gets its answer when every backup has them too.

        Args:
            values: flat, of the partition's length.
            state: the optimizer's state of each segment; empty where it has taken no step.
        """
        if partition in self.owned and partition not in self.leaving:
            self._allocate(partition)
        partition_state = self.require_partition(partition)
        # The event log numbers the updates of a partition: a load in mid-run must not go back.
        updates = clock if self.staleness == 0 else max(clock, partition_state.clock)
        partition_state.load(values, state, updates)
        self._reset_requests(partition, dict.fromkeys(self.workers, clock))
        load_done = LoadDone(worker, partition)
        return [
            *self._fill_backups(partition),
            *self.backups.defer(partition, partition_state.clock, [load_done]),
        ]

    def push(
        self,
        worker: int,
        step: int,
        partition: int,
        gradient: Tensor,
        grad_mask: bytes,
        sparse: bool = False,
    ) -> list[Outgoing]:
        """Take a worker's gradient of a partition.

        Args:
            gradient: flat, of the partition's length. It is kept, not copied, until the step.
            grad_mask: a byte for each segment: 1 where it has a gradient.
            sparse: most of the gradient is zeros.

        Raises:
            ProtocolViolation: an unknown worker, another shape, or a step too far ahead.
            NotOwner: see `require_partition`.
        """
        state = self.require_partition(partition)
        if worker not in self.done[partition]:
            raise ProtocolViolation(f"worker {worker} is none of {self.workers}")
        if len(grad_mask) != len(state.part.segments) or gradient.shape != state.values.shape:
            raise ProtocolViolation(
                f"a gradient of part {partition} has another shape than the part"
            )
        done = self.done[partition][worker]
        if step > done:
            raise ProtocolViolation(
                f"worker {worker} pushes step {step} of part {partition} before step {done}"
            )
        if step < done:  # resent: the answer to the first push was lost
            return self.backups.defer(partition, state.clock, self._read(worker, partition))
        if self.staleness == 0:
            push = Push(step, gradient, grad_mask, sparse)
            self.sums[partition].add(worker, push, self.workers)
            return [*self._answer_queries(partition), *self._step_sync(partition)]
        self.pushed[worker, partition] = Push(step, gradient, grad_mask)
        return self._step_async(worker, partition)

    def request_step(self, worker: int, step: int, request: StepRequest) -> Iterator[Outgoing]:
        """Take a worker's optimizer settings for a step.

        The worker has finished its backward pass, so new values cannot disturb it. A synchronous
        step waits for the requests of all workers, and uses the one of the first worker.

        Returns:
            Messages to send. The iterator is lazy and must be exhausted: each `next()` steps one
            partition, so the reply for it is sent while the next partition is stepped.
        """
        self.step_requests[worker] = (step, request)
        answered = sorted((self.owned & set(self.held)) - self.leaving)
        if self.staleness == 0:
            return (out for partition in answered for out in self._step_sync(partition))
        return (out for partition in answered for out in self._step_async(worker, partition))

    def query_gradient(
        self, worker: int, step: int, partition: int, as_tensor: bool
    ) -> list[Outgoing]:
        """Ask for the sum of a partition's gradients in a synchronous step.

        The answer comes when every worker has pushed, so before the step is taken.

        Args:
            as_tensor: the answer is the tensor; else it is the sum of its squares.
        """
        self.require_partition(partition)
        self.queries.append(GradientQuery(worker, step, partition, as_tensor))
        return self._answer_queries(partition)

    def pull(self, worker: int, partition: int) -> list[Outgoing]:
        """Ask for the newest values, whatever their staleness.

        Workers pull at a moment when none of them pushes: for an evaluation, or to save."""
        state = self.require_partition(partition)
        done = self.done[partition]
        self._log_event(Event("p", partition, state.clock, worker, done[worker]))
        values = self._snapshot(worker, partition, state.values)
        response = PullResponse(worker, partition, done[worker], min(done.values()), values)
        return self.backups.defer(partition, state.clock, [response])

    # Steps

    def _step_sync(self, partition: int) -> list[Outgoing]:
        """Step a partition if all workers have pushed it and requested the step."""
        state, sum_ = self.held[partition], self.sums[partition]
        requested = all(
            self.step_requests.get(worker, (-1,))[0] == state.clock for worker in self.workers
        )
        if not requested or len(sum_.added) < len(self.workers):
            return []
        step, request = self.step_requests[self.workers[0]]
        # The sum has the NaN of any worker: what one of them drops is dropped for all.
        requests = [self.step_requests[worker][1] for worker in self.workers]
        request = request._replace(
            leaves_out=any(each.leaves_out for each in requests),
            without=[name for each in requests for name in each.without],
        )
        self.sums[partition] = GradientSum(sum_.memory)
        # Only after a sparse gradient some blocks of values stay equal, and need not be sent.
        before = state.values.clone() if sum_.sparse else None
        update = GradientUpdate(-1, step, sum_.total(), sum_.present)
        replicated = self._apply(partition, update, request)
        self.changed.pop(partition, None)
        if before is not None:
            self.changed[partition] = (state.clock, changed(before, state.values))
        answers = [out for worker in self.workers for out in self._read(worker, partition)]
        return [*replicated, *self.backups.defer(partition, state.clock, answers)]

    def _step_async(self, worker: int, partition: int) -> list[Outgoing]:
        """Step a partition by one worker's push, if that worker has requested the step."""
        push = self.pushed.get((worker, partition))
        step, request = self.step_requests.get(worker, (-1, None))
        if push is None or request is None or step != push.step:
            return []
        del self.pushed[worker, partition]
        update = GradientUpdate(worker, step, push.gradient, push.present)
        replicated = self._apply(partition, update, request)
        self.readers[partition][worker] = step + 1
        # The step may also let others read, who have waited for this worker.
        answers = self._release_reads(partition)
        clock = self.held[partition].clock
        return [*replicated, *self.backups.defer(partition, clock, answers)]

    def _apply(
        self, partition: int, update: GradientUpdate, request: StepRequest
    ) -> list[Outgoing]:
        """Run the optimizer on a partition, and return the same update for each backup."""
        state = self.held[partition]
        settings = request.settings[state.part.group]
        # A step in which no segment has a gradient counts in the clock too.
        names = [segment.name for segment in state.part.segments]
        update = update._replace(grad_mask=request.mask(update.grad_mask, names))
        if request.scale != 1.0:  # not in place: it may be the memory of a worker
            update = update._replace(gradient=update.gradient * request.scale)
        clock = state.clock
        state.apply(update.gradient, update.grad_mask, settings)
        self._count_steps(partition, update.worker, update.step)
        self._log_event(Event("a", partition, clock, update.worker, update.step))
        return [
            ReplicateUpdate(backup, partition, clock, update, settings)
            for backup in self.backups.clocks
        ]

    # Reads

    def _release_reads(self, partition: int) -> list[Outgoing]:
        """Answer the workers whose read the staleness bound allows now."""
        slowest = min(self.done[partition].values())
        allowed = [
            worker
            for worker, clock in self.readers[partition].items()
            if self.staleness is None or slowest >= clock - self.staleness
        ]
        return [out for worker in sorted(allowed) for out in self._read(worker, partition)]

    def _read(self, worker: int, partition: int) -> list[Outgoing]:
        """Answer a worker with a partition's values, or register it as a waiting reader."""
        state, done = self.held[partition], self.done[partition]
        clock, slowest = done[worker], min(done.values())
        if self.staleness is not None and slowest < clock - self.staleness:
            self.readers[partition][worker] = clock
            return []
        self.readers[partition].pop(worker, None)
        self.staleness_counts[clock - slowest] += 1
        self._log_event(Event("r", partition, state.clock, worker, clock))
        # In synchronous steps the values cannot change before every worker has read them.
        values = (
            state.values if self.staleness == 0 else self._snapshot(worker, partition, state.values)
        )
        changed_at, blocks = self.changed.get(partition, (-1, None))
        changed_blocks = blocks if changed_at == state.clock else None
        return [PullResponse(worker, partition, clock, slowest, values, changed_blocks)]

    def _answer_queries(self, partition: int) -> list[Outgoing]:
        """Answer the queries about a partition's gradient sum, once the sum is complete."""
        state, sum_ = self.held[partition], self.sums[partition]
        if len(sum_.added) < len(self.workers):
            return []
        ready = [
            query for query in self.queries if query.part == partition and query.step == state.clock
        ]
        self.queries = [query for query in self.queries if query not in ready]
        return [respond(query, sum_) for query in ready]
