"""The recorded order of an asynchronous run, from the event logs of its shards, and its replay.

      event log     part 0   update 0 is worker 1's step 0, update 1 is worker 0's step 0, ...
                    part 0   worker 0 computes its step 1 from the values after update 2

A gradient can be computed when every partition has reached the values that the worker read. An
update can be applied when its gradient is known. One process that respects both rules finds an
order, because the original run was such an order. It needs no servers:

      worker ── push, request_step ──> ReplayClient ── stepped() ──> RecordedOrder.replay: updates
      worker <── values ────────────── ReplayClient <── take() ───── RecordedOrder.replay
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from shoal.comm.compression.base import Compression
from shoal.errors import RecordError, UsageError
from shoal.parameter_server.events import StepRequest
from shoal.parameter_server.node.event_log import Event
from shoal.parameter_server.node.partition_state import PartitionState, cloned
from shoal.parameter_server.optimizer_spec import OptimizerSpec
from shoal.parameter_server.worker.flat_params import FlatParams

T = TypeVar("T")
CURE = (
    "The parameter server that noted it was replaced or removed, an answer was lost and given "
    "again with newer values, or the file is damaged. What was saved before can be replayed: "
    "`shoal replay RUN --step N` ends at the checkpoint of step N."
)


class ReplayStep(NamedTuple):
    """A worker's pushes of a step: gradients of partitions with the masks of their segments."""

    gradients: Mapping[int, tuple[Tensor, bytes]]
    order: StepRequest


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
        self.workers, self.steps = workers, steps
        updates: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
        # A pull after a step replaces the values that were read after it. At the start all workers
        # have the same values.
        starts = {(worker, 0, part): {0} for worker in range(workers) for part in range(parts)}
        reads: dict[tuple[int, int, int], set[int]] = defaultdict(set)
        pulls: dict[tuple[int, int, int], set[int]] = defaultdict(set)
        for kind, part, clock, worker, step in events:
            if part >= parts or worker >= workers:
                reason = f"the record speaks of part {part} of {parts}, worker {worker}."
                raise RecordError(f"{reason} {CURE}")
            if step >= steps:
                continue
            if kind == "a":
                updates[part, clock].add((worker, step))
            else:
                (pulls if kind == "p" else reads)[worker, step, part].add(clock)
        clocks = starts | reads | pulls
        self.applied = [
            [
                _only(updates[part, clock], f"what was update {clock} of part {part}")
                for clock in range(workers * steps)
            ]
            for part in range(parts)
        ]
        self.read = {
            (worker, step): [
                _only(
                    clocks.get((worker, step, part), ()),
                    f"from which values of part {part} worker {worker} began its step {step}",
                )
                for part in range(parts)
            ]
            for worker in range(workers)
            for step in range(steps)
        }
        self.agreed = {step for _, step, _ in pulls}
        for part, order in enumerate(self.applied):
            self._check(part, order)

    def _check(self, part: int, order: Sequence[tuple[int, int]]) -> None:
        """Check that a worker's steps follow each other, and that it read a part between the
        updates of its last and its next push.
        """
        last_update = dict.fromkeys(range(self.workers), -1)
        taken = dict.fromkeys(range(self.workers), 0)
        for clock, (worker, step) in enumerate(order):
            read = self.read[worker, step][part]
            if step != taken[worker] or not last_update[worker] < read <= clock:
                raise RecordError(
                    f"the record contradicts itself: worker {worker} would have computed its "
                    f"step {step} from values of part {part} that it did not have then. {CURE}"
                )
            last_update[worker] = clock
            taken[worker] += 1

    def replay(
        self,
        held: Sequence[PartitionState],
        take: Callable[[int, int, Tensor], None],
        step: Callable[[int, int], ReplayStep],
    ) -> None:
        """Take all steps in the recorded order.

        Args:
            held: every partition in its initial state, with clock 0.
            take: called with a worker, a partition and the values that the worker's next step
                starts from. It must copy them.
            step: called with a worker and a step, when the worker has all values. Its result may
                change at the worker's next step.

        Raises:
            RecordError: no order fits the record.
        """
        missing = dict.fromkeys(self.read, len(held))
        pushed: dict[int, tuple[int, ReplayStep]] = {}  # the last step that each worker took
        readers: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for reader, clocks in self.read.items():
            for part, clock in enumerate(clocks):
                readers[part, clock].append(reader)

        def deliver(part: int) -> None:
            for worker, number in readers.pop((part, held[part].clock), ()):
                take(worker, part, held[part].values)
                missing[worker, number] -= 1
                if not missing[worker, number]:
                    pushed[worker] = number, step(worker, number)

        def advance(part: int) -> bool:
            """Apply a partition's next update. Return False if its gradient is not known yet."""
            clock, order = held[part].clock, self.applied[part]
            worker, number = order[clock] if clock < len(order) else (-1, 0)
            if worker not in pushed or pushed[worker][0] != number:
                return False
            _apply(held[part], pushed[worker][1])
            deliver(part)
            return True

        for part in range(len(held)):
            deliver(part)
        while sum(map(advance, range(len(held)))):
            pass
        for part, order in enumerate(self.applied):
            if (clock := held[part].clock) < len(order):
                worker, number = order[clock]
                raise RecordError(
                    f"the record contradicts itself: step {number} of worker {worker} cannot have "
                    f"come before what it was computed from. {CURE}"
                )


def _only(found: Iterable[T], question: str) -> T:
    """Return the one answer to a question about the record."""
    answers = list(found)
    if len(answers) != 1:
        told = " or ".join(map(str, sorted(answers)))  # type: ignore[type-var]
        raise RecordError(
            f"the record does not say {question}{f': {told}' if told else ''}. {CURE}"
        )
    return answers[0]


def _apply(held: PartitionState, pushed: ReplayStep) -> None:
    """Take a partition's step as a server does."""
    gradient, present = pushed.gradients[held.part.number]
    present = pushed.order.mask(present, [segment.name for segment in held.part.segments])
    if pushed.order.scale != 1.0:
        gradient = gradient * pushed.order.scale
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in servers: rows in several threads may be rounded otherwise
    held.apply(gradient, present, pushed.order.settings[held.part.group])
    torch.set_num_threads(threads)


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

    # Methods of `WorkerClient`

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
