"""The recorded order of an asynchronous run, from the event logs of its shards, and its replay.

      event log     part 0   update 0 is worker 1's step 0, update 1 is worker 0's step 0, ...
                    part 0   worker 0 computes its step 1 from the values after update 2

A gradient can be computed when every partition has reached the values that the worker read. An
update can be applied when its gradient is known. One process that respects both rules finds an
order, because the original run was such an order. It needs no servers:

      worker ── push, request_step ──> ReplayClient ── stepped() ──> Replayer: applies updates
      worker <── values ────────────── ReplayClient <── take() ───── Replayer
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.comm.compression.base import Compression
from shoal.errors import RecordError, UsageError
from shoal.parameter_server.events import StepRequest
from shoal.parameter_server.node.event_log import Event
from shoal.parameter_server.node.partition_state import PartitionState, cloned
from shoal.parameter_server.optimizer_spec import OptimizerSpec
from shoal.parameter_server.worker.flat_params import FlatParams

CURE = (
    "The parameter server that noted it was replaced or removed, or the file is damaged. What was "
    "saved before can be replayed: `shoal replay RUN --step N` ends at the checkpoint of step N."
)


class RecordedOrder:
    """The order of events in the first steps of each worker, without gaps and contradictions.

    Attributes:
        applied: for each partition the pushes (worker, step) that were its updates 0, 1, 2, ...
        read: (worker, step) -> for each partition the number of updates in the values from which
            the step was computed.
        agreed: steps before which all workers had the same values, for an evaluation or a save.

    Raises:
        RecordError: names the gap or the contradiction.
    """

    def __init__(self, events: Iterable[Event], parts: int, workers: int, steps: int) -> None:
        self.parts = parts
        self.workers = workers
        self.steps = steps
        updates: list[dict[int, tuple[int, int]]] = [{} for _ in range(parts)]
        reads: dict[tuple[int, int, int], set[int]] = {}
        pulls: dict[tuple[int, int, int], set[int]] = {}
        for event in events:
            if not (0 <= event.part < parts and 0 <= event.worker < workers):
                raise RecordError(
                    f"the record speaks of part {event.part} of {parts}, worker {event.worker}. "
                    f"{CURE}"
                )
            if event.step >= steps:
                continue
            if event.kind == "a":
                push = event.worker, event.step
                if updates[event.part].setdefault(event.clock, push) != push:
                    raise RecordError(
                        f"part {event.part} took two different pushes as its update {event.clock}. "
                        f"{CURE}"
                    )
            else:
                table = pulls if event.kind == "p" else reads
                table.setdefault((event.worker, event.step, event.part), set()).add(event.clock)
        self.applied = [self._in_order(part, by_clock) for part, by_clock in enumerate(updates)]
        self.read = self._sources(reads, pulls)
        self.agreed = {step for _, step, _ in pulls}
        self._check_consistent()

    def _in_order(
        self, part: int, by_clock: Mapping[int, tuple[int, int]]
    ) -> list[tuple[int, int]]:
        count = self.workers * self.steps
        missing = next((clock for clock in range(count) if clock not in by_clock), None)
        if missing is not None:
            raise RecordError(
                f"the record does not say what was update {missing} of part {part}. {CURE}"
            )
        order = [by_clock[clock] for clock in range(count)]
        for worker in range(self.workers):
            if [step for pusher, step in order if pusher == worker] != list(range(self.steps)):
                raise RecordError(
                    f"part {part} did not take each step of worker {worker} once, in order. {CURE}"
                )
        return order

    def _sources(
        self,
        reads: Mapping[tuple[int, int, int], set[int]],
        pulls: Mapping[tuple[int, int, int], set[int]],
    ) -> dict[tuple[int, int], list[int]]:
        """Return the number of updates in the values that each step started from, by partition.

        A pull after a step replaces the values that were read after it. At the start all workers
        have the same values.
        """
        sources: dict[tuple[int, int], list[int]] = {}
        for worker in range(self.workers):
            for step in range(self.steps):
                clocks = []
                for part in range(self.parts):
                    read = reads.get((worker, step, part), set())
                    pulled = pulls.get((worker, step, part), set())
                    clocks.append(self._source(worker, step, part, read, pulled))
                sources[worker, step] = clocks
        return sources

    def _source(self, worker: int, step: int, part: int, read: set[int], pulled: set[int]) -> int:
        question = f"from which values of part {part} worker {worker} began its step {step}"
        clocks = pulled or read or ({0} if step == 0 else set())
        if not clocks:
            raise RecordError(f"the record does not say {question}. {CURE}")
        if len(clocks) > 1 or max(read, default=0) > min(clocks):
            raise RecordError(
                f"the record does not tell {question}: after "
                f"{' or '.join(map(str, sorted(read | pulled)))} updates. An "
                "answer was lost on the way, and given again with newer values."
            )
        return min(clocks)

    def _check_consistent(self) -> None:
        """Check that a worker reads a part between the updates of its last and its next push."""
        for part, order in enumerate(self.applied):
            last_update = dict.fromkeys(range(self.workers), -1)
            for clock, (worker, step) in enumerate(order):
                if not last_update[worker] < self.read[worker, step][part] <= clock:
                    raise RecordError(
                        f"the record contradicts itself: worker {worker} would have computed its "
                        f"step {step} from values of part {part} that it did not have then. {CURE}"
                    )
                last_update[worker] = clock


class ReplayStep(NamedTuple):
    """A worker's pushes of a step: gradients of partitions with the masks of their segments."""

    gradients: Mapping[int, tuple[Tensor, bytes]]
    order: StepRequest


class Replayer:
    """Replays a run in its recorded order.

    Args:
        held: every partition in its initial state, with clock 0.
        take: called with a worker, a partition and the values that the worker's next step starts
            from. It must copy them.
        step: called with a worker and a step, when the worker has all values. Its result may
            change at the worker's next step.
    """

    def __init__(
        self,
        course: RecordedOrder,
        held: Sequence[PartitionState],
        take: Callable[[int, int, Tensor], None],
        step: Callable[[int, int], ReplayStep],
    ) -> None:
        self.course = course
        self.held = held
        self.take = take
        self.step = step
        # Values that a worker's step still waits for, and the last step that each worker took.
        self.missing = dict.fromkeys(course.read, course.parts)
        self.stepped: dict[int, tuple[int, ReplayStep]] = {}
        self.readers: list[dict[int, list[tuple[int, int]]]] = [{} for _ in held]
        for reader, clocks in course.read.items():
            for part, clock in enumerate(clocks):
                self.readers[part].setdefault(clock, []).append(reader)

    def run(self) -> None:
        """Take all steps. Raises RecordError: no order fits the record."""
        parts = range(self.course.parts)
        for part in parts:
            self._deliver(part)
        while sum(self._advance(part) for part in parts):
            pass
        for part in parts:
            if self.held[part].clock < len(self.course.applied[part]):
                worker, step = self.course.applied[part][self.held[part].clock]
                raise RecordError(
                    f"the record contradicts itself: step {step} of worker {worker} cannot have "
                    f"come before what it was computed from. {CURE}"
                )

    def _advance(self, part: int) -> bool:
        """Apply a partition's updates until a gradient is unknown. Return True if one was."""
        held = self.held[part]
        applied = self.course.applied[part]
        first_clock = held.clock
        while held.clock < len(applied):
            worker, step = applied[held.clock]
            known_step, stepped = self.stepped.get(worker, (-1, None))
            if stepped is None or known_step != step:
                break
            gradient, present = stepped.gradients[part]
            present = stepped.order.mask(present, [s.name for s in held.part.segments])
            if stepped.order.scale != 1.0:
                gradient = gradient * stepped.order.scale
            with _single_threaded():
                held.apply(gradient, present, stepped.order.settings[held.part.group])
            self._deliver(part)
        return held.clock > first_clock

    def _deliver(self, part: int) -> None:
        for worker, step in self.readers[part].pop(self.held[part].clock, ()):
            self.take(worker, part, self.held[part].values)
            self.missing[worker, step] -= 1
            if not self.missing[worker, step]:
                self.stepped[worker] = step, self.step(worker, step)


@contextmanager
def _single_threaded() -> Iterator[None]:
    """Use one thread, as servers do: parts of rows in several threads may be rounded otherwise."""
    previous = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


class ReplayClient:
    """Stands in for the `WorkerClient` of one worker: it keeps what the worker pushes.

    Args:
        held: the partitions, shared by all workers; the first worker fills the list.
        compression: of the pushed gradients.
    """

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
        self.step, self.stop_at = 0, 0
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

    # For the worker, as the methods of `WorkerClient`

    def push(self, part: int, gradient: Tensor, present: bytes, _sparse: bool = False) -> None:
        if self._compression is not None:
            layout = self.parts[part]
            gradient = self._compression.decode(gradient, layout.length, layout.dtype)
        self._pushed[part] = gradient, present

    def request_step(self, order: StepRequest) -> None:
        self._order = order
        self.step += 1

    def wait(self, _parts: Iterable[int]) -> None:
        """Return at once: `take` delivers the values of a step before it starts."""

    def pull(self) -> None:
        for part, held in enumerate(self.held):
            self.take(part, held.values)

    def load(self, states: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        for held, values, state in zip(self.held, self.values, states, strict=True):
            held.load(values, list(state), 0)

    def mark_current(self) -> None:
        """Do nothing: no values are on their way."""

    def state(self, part: int) -> list[dict[str, Any]]:
        return [cloned(state) for state in self.held[part].state()]
