"""The course that a run with stale workers took, out of what its shards have noted; and the same
course once more.

      notes     part 0   update 0 of worker 1's step 0, update 1 of worker 0's step 0, ...
                part 0   worker 0 computes its step 1 from the values after update 2

A gradient is known once every part has come to the values that it was computed from; an update can
be made once its gradient is known. One process that keeps to both finds an order, for there was
one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.errors import RecordError
from shoal.parameter_server.events import StepRequest
from shoal.parameter_server.node.event_log import Event
from shoal.parameter_server.node.partition_state import PartitionState

CURE = (
    "The parameter server that noted it was replaced or removed, or the file is damaged. What was "
    "saved before can be "
    "replayed: `shoal replay RUN --step N` goes as far as the checkpoint of step N."
)


class RecordedOrder:
    """What happened in the first `steps` steps of each worker, checked: without gaps and without
    doubt.

    Attributes: applied: for each part, whose push (worker, step) was its update 0, 1, 2 and so on.
        read: (worker, step) -> for each part, after how many updates its values were those that the
        step began with. agreed: steps before which all workers had the same values, for an
        evaluation or to be saved.

    Raises: RecordError: names what is missing or contradicts itself.
    """

    def __init__(self, events: Iterable[Event], parts: int, workers: int, steps: int) -> None:
        self.parts, self.workers, self.steps = parts, workers, steps
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
                done = updates[event.part].setdefault(event.clock, (event.worker, event.step))
                if done != (event.worker, event.step):
                    raise RecordError(
                        f"part {event.part} took two different pushes as its update {event.clock}. "
                        f"{CURE}"
                    )
            else:
                table = pulls if event.kind == "p" else reads
                table.setdefault((event.worker, event.step, event.part), set()).add(event.clock)
        self.applied = [self._in_order(part, found) for part, found in enumerate(updates)]
        self.read = self._sources(reads, pulls)
        self.agreed = {step for _, step, _ in pulls}
        self._check_consistent()

    def _in_order(self, part: int, found: Mapping[int, tuple[int, int]]) -> list[tuple[int, int]]:
        count = self.workers * self.steps
        missing = next((clock for clock in range(count) if clock not in found), None)
        if missing is not None:
            raise RecordError(
                f"the record does not say what was update {missing} of part {part}. {CURE}"
            )
        order = [found[clock] for clock in range(count)]
        for worker in range(self.workers):
            if [step for who, step in order if who == worker] != list(range(self.steps)):
                raise RecordError(
                    f"part {part} did not take each step of worker {worker} once, in order. {CURE}"
                )
        return order

    def _sources(
        self,
        reads: Mapping[tuple[int, int, int], set[int]],
        pulls: Mapping[tuple[int, int, int], set[int]],
    ) -> dict[tuple[int, int], list[int]]:
        """What was pulled after a step replaces what was read after it. In the beginning,
        everyone has the same.
        """
        found: dict[tuple[int, int], list[int]] = {}
        for worker in range(self.workers):
            for step in range(self.steps):
                clocks = []
                for part in range(self.parts):
                    read, pulled = (
                        reads.get((worker, step, part), set()),
                        pulls.get((worker, step, part), set()),
                    )
                    clocks.append(self._source(worker, step, part, read, pulled))
                found[worker, step] = clocks
        return found

    def _source(self, worker: int, step: int, part: int, read: set[int], pulled: set[int]) -> int:
        where = f"from which values of part {part} worker {worker} began its step {step}"
        last = pulled or read or ({0} if step == 0 else set())
        if not last:
            raise RecordError(f"the record does not say {where}. {CURE}")
        if len(last) > 1 or max(read, default=0) > min(last):
            raise RecordError(
                f"the record does not tell {where}: after "
                f"{' or '.join(map(str, sorted(read | pulled)))} updates. An "
                "answer was lost on the way, and given again with newer values."
            )
        return min(last)

    def _check_consistent(self) -> None:
        """A worker reads a part after its last push of it was applied, and before its next one
        is.
        """
        for part, order in enumerate(self.applied):
            own = dict.fromkeys(range(self.workers), -1)
            for clock, (worker, step) in enumerate(order):
                if not own[worker] < self.read[worker, step][part] <= clock:
                    raise RecordError(
                        f"the record contradicts itself: worker {worker} would have computed its "
                        f"step {step} from "
                        f"values of part {part} that it did not have then. {CURE}"
                    )
                own[worker] = clock


class ReplayStep(NamedTuple):
    """What a worker pushed in one step: of each part a gradient and which segments have one;
    and its order.
    """

    gradients: Mapping[int, tuple[Tensor, bytes]]
    order: StepRequest


def replay_events(
    course: RecordedOrder,
    held: Sequence[PartitionState],
    take: Callable[[int, int, Tensor], None],
    step: Callable[[int, int], ReplayStep],
) -> None:
    """Take the same course again.

    Args: held: every part, as it was in the beginning, with clock 0. take: is given a worker, a
        part and its values, which the worker's next step begins with. It copies them. step: is
        given a worker and a step, once it has all values. What it returns may change at its next
        step.

    Raises: RecordError: no order of things leads through the record.
    """
    _Replayer(course, held, take, step).run()


class _Replayer:
    def __init__(
        self,
        course: RecordedOrder,
        held: Sequence[PartitionState],
        take: Callable[[int, int, Tensor], None],
        step: Callable[[int, int], ReplayStep],
    ) -> None:
        self.course, self.held, self.take, self.step = course, held, take, step
        self.missing = dict.fromkeys(course.read, course.parts)
        self.stepped: dict[int, tuple[int, ReplayStep]] = {}
        self.readers: list[dict[int, list[tuple[int, int]]]] = [{} for _ in held]
        for reader, clocks in course.read.items():
            for part, clock in enumerate(clocks):
                self.readers[part].setdefault(clock, []).append(reader)

    def run(self) -> None:
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
                    "come before what it "
                    f"was computed from. {CURE}"
                )

    def _advance(self, part: int) -> bool:
        """Make a part's updates as far as their gradients are known; whether there were any."""
        held, applied = self.held[part], self.course.applied[part]
        before = held.clock
        while held.clock < len(applied):
            worker, step = applied[held.clock]
            known, stepped = self.stepped.get(worker, (-1, None))
            if stepped is None or known != step:
                break
            gradient, present = stepped.gradients[part]
            if stepped.order.scale != 1.0:
                gradient = gradient * stepped.order.scale
            with _single_threaded():
                held.apply(gradient, present, stepped.order.settings[held.part.group])
            self._deliver(part)
        return held.clock > before

    def _deliver(self, part: int) -> None:
        for worker, step in self.readers[part].pop(self.held[part].clock, ()):
            self.take(worker, part, self.held[part].values)
            self.missing[worker, step] -= 1
            if not self.missing[worker, step]:
                self.stepped[worker] = step, self.step(worker, step)


@contextmanager
def _single_threaded() -> Iterator[None]:
    """As servers do: where a long row is split between threads, its last numbers may be rounded
    otherwise.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
