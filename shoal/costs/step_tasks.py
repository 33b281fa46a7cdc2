"""From a step's cost to its tasks, and from their simulation to its time.

      rank 0 compute    step │ F0 ─── F1 ─── B0 ─────┐         ┌ optimizer
      rank 0 messages          prefetched    └ beside ─┘ after ─┘
      rank 0 sends                 └ to the next stage

A message for which the rank waits stands between two tasks of its queue of computing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from shoal.costs.event_simulator import StepTask, Timeline, simulate
from shoal.costs.machine import Compute, Machine
from shoal.costs.network import Network
from shoal.costs.pass_table import Action
from shoal.costs.step_cost import LocalSegment, Overheads, SentMessage, StepCost
from shoal.costs.work import SegmentWork


@dataclass(frozen=True)
class StepTime:
    """The predicted time of a step.

    Attributes:
        seconds: until the last rank has ended.
        on_path: seconds on the critical path, by what takes them: compute, optimizer, or the kind
            and axis of a message.
        idle: share of the ranks' time in which they do not compute.
    """

    seconds: float
    on_path: Mapping[str, float]
    idle: float
    tasks: tuple[StepTask, ...]
    timeline: Timeline

    @property
    def bound_by(self) -> str:
        """Return what takes most of the critical path."""
        return max(self.on_path, key=lambda label: self.on_path[label])


class SegmentTimer:
    """Predicts how long a rank computes.

    Args: ranks: on one host, all of which compute.
    """

    def __init__(self, machine: Machine, ranks: int) -> None:
        self.speeds: Compute = machine.compute_of(ranks)
        self.crowding = machine.crowding(ranks)
        self._known: dict[tuple[int, float, float], tuple[float, float]] = {}
        self._alive: list[SegmentWork] = []

    def __call__(self, work: SegmentWork, samples: float) -> tuple[float, float]:
        return self.share(work, samples, 1.0)

    def share(self, work: SegmentWork, samples: float, share: float) -> tuple[float, float]:
        """Return the seconds of both passes where the rank computes a share of each operation."""
        key = (id(work), samples, share)
        if key not in self._known:
            self._alive.append(work)  # so that no other one gets its id
            speeds = self.speeds
            forward = sum(
                speeds.op_s(op, samples, share, speeds.forward_op_s) for op in work.forward
            )
            backward = sum(
                speeds.op_s(op, samples, share, speeds.backward_op_s) for op in work.backward
            )
            self._known[key] = (forward * self.crowding, backward * self.crowding)
        return self._known[key]

    def optimizer(self, step: StepCost) -> float:
        """Return the seconds of the optimizer's step of the fullest rank."""
        speeds = self.speeds
        share = step.optimizer_share
        if not share:
            return 0.0
        return self.crowding * sum(
            speeds.op_s(op, 0, share, speeds.step_op_s) for op in step.model.optimizer
        )


def least_seconds(step: StepCost, timer: SegmentTimer, network: Network) -> float:
    """Return seconds that a step takes at least.

    A rank is busy for so long, after the first micro-batch has come to it and before the last one
    has gone back from it. Its messages, which may travel meanwhile, take turns.
    """
    builder = _TaskBuilder(step, timer, network)
    return max(
        max(builder.busy_s(rank) + builder.outside_s(rank), builder.messages_s(rank))
        for rank in range(len(step.rows))
    )


def step_time(step: StepCost, timer: SegmentTimer, network: Network) -> StepTime:
    """Simulate a step and return its time."""
    tasks = _TaskBuilder(step, timer, network).tasks()
    # Parameter servers of one host compute too, on the cores of the ranks.
    slow = network.machine.overlap_slowdown * network.server_crowding(step)
    slowdowns = {
        f"rank {rank} compute": (f"rank {rank} messages", slow) for rank in range(len(step.rows))
    }
    timeline = simulate(tasks, slowdowns)
    busy = sum(task.work_s for task in tasks if task.queue.endswith("compute"))
    idle = 1 - busy / (len(step.rows) * timeline.length) if timeline.length else 0.0
    path = _critical_path(tasks, timeline)
    return StepTime(timeline.length, path, max(idle, 0.0), tuple(tasks), timeline)


class _Part(NamedTuple):
    """A stretch of computing with the messages around it.

    Attributes: prefetched: id of the segment whose early messages it waits for; 0 for none.
    """

    seconds: float
    before: tuple[SentMessage, ...] = ()
    after: tuple[SentMessage, ...] = ()
    beside: tuple[SentMessage, ...] = ()
    prefetched: int = 0


def _merged(parts: Iterable[_Part]) -> list[_Part]:
    """Join stretches that no message divides."""
    merged: list[_Part] = []
    for part in parts:
        joins = merged and not (merged[-1].after or merged[-1].beside)
        if joins and not (part.before or part.prefetched):
            seconds = merged[-1].seconds + part.seconds
            merged[-1] = merged[-1]._replace(seconds=seconds, after=part.after, beside=part.beside)
        else:
            merged.append(part)
    return merged


class _TaskBuilder:
    """Makes the tasks of a step.

    Attributes: last: for each rank, the task that its next computing waits for.
    """

    def __init__(self, step: StepCost, timer: SegmentTimer, network: Network) -> None:
        self.step = step
        self.timer = timer
        self.network = network
        self.made: list[StepTask] = []
        self.last: dict[int, tuple[int, ...]] = defaultdict(tuple)
        self.pending_s: dict[int, float] = defaultdict(float)
        self.beside: dict[int, list[int]] = defaultdict(list)
        self.prefetched: dict[int, tuple[int, ...]] = {}
        self.parts: dict[tuple[int, str], list[_Part]] = {}
        self.seconds: dict[SentMessage, float] = {}
        self.samples = step.samples

    def tasks(self) -> list[StepTask]:
        ranks = range(len(self.step.rows))
        for rank in ranks:
            self._prefetch(rank)
            self.pending_s[rank] += self.timer.speeds.step_s
        for number in range(self.step.accumulate):
            is_last, ends = number == self.step.accumulate - 1, list[int]()
            for each in self.step.passes.order:
                waits = tuple(ends[index] for index in each.needs)
                ends.append(self._act(each.rank, each.action, waits, is_last and each.is_last))
        for rank in ranks:
            self._finish(rank)
        return self.made

    def busy_s(self, rank: int) -> float:
        """Return the seconds in which a rank computes, or waits for messages of its own."""
        passes_s = sum(
            number * sum(part.seconds for part in self._parts(stage, kind))
            for (kind, stage), number in self.step.passes.counts[rank].items()
        )
        around_s = self.timer.speeds.step_s + self.timer.optimizer(self.step)
        return self.step.accumulate * passes_s + around_s + self._waited_s(rank)

    def messages_s(self, rank: int) -> float:
        """Return the seconds of a rank's messages, whether it waits for them or not."""
        segments = self.step.segments_of_rank(rank)
        early = (message for s in segments for message in (*s.prefetched, *s.beside))
        return sum(map(self._seconds, early)) + self._waited_s(rank)

    def _waited_s(self, rank: int) -> float:
        passes_s = sum(
            number * self._waits_s(*part.before, *part.after)
            for (kind, stage), number in self.step.passes.counts[rank].items()
            for part in self._parts(stage, kind)
        )
        after = *self.step.after_passes.get(rank, ()), *self.step.after_step.get(rank, ())
        return self.step.accumulate * passes_s + self._waits_s(*after)

    def outside_s(self, rank: int) -> float:
        """Return the seconds of other stages before a rank's first pass and behind its last one."""
        row = self.step.rows[rank]
        kinds = "F", row[-1].kind if row[-1].kind in "BI" else ""
        return sum(
            part.seconds
            for kind, stage in zip(kinds, (row[0].stage, row[-1].stage), strict=True)
            for earlier in range(stage if kind else 0)
            for part in self._parts(earlier, kind)
        )

    def _waits_s(self, *messages: SentMessage) -> float:
        return sum(self._seconds(each) for each in messages if each.kind != "send")

    def _act(self, rank: int, action: Action, waits: tuple[int, ...], is_last: bool) -> int:
        """Add one pass through a stage; return the task after which the next stage may begin."""
        self._flush(rank)
        self.last[rank] = (*self.last[rank], *waits)
        sends: list[int] = []
        for part in self._parts(action.stage, action.kind):
            if part.prefetched and (early := self.prefetched.pop(part.prefetched, ())):
                self._flush(rank)
                self.last[rank] = (*self.last[rank], *early)
            self._wait_for(rank, part.before)
            self.pending_s[rank] += part.seconds
            if is_last and part.beside:
                after = self._flush(rank)
                for message in filter(self._seconds, part.beside):
                    self.beside[rank].append(self._message(rank, message, (after,)))
            sends += self._wait_for(rank, part.after)
        end = self._flush(rank)
        return sends[-1] if sends else end

    def _parts(self, stage: int, kind: str) -> list[_Part]:
        """Return a pass through a stage, divided where messages come."""
        key = (stage, kind)
        if key not in self.parts:
            make = self._forward_part if kind == "F" else partial(self._backward_part, kind)
            segments = self.step.segments_by_stage[stage]
            parts = map(make, segments if kind == "F" else reversed(segments))
            around = _Part(self._overhead_s(self.step.around_pass))
            self.parts[key] = _merged((around, *parts))
        return self.parts[key]

    def _forward_part(self, segment: LocalSegment) -> _Part:
        seconds, _ = self.timer.share(segment.work, self.samples, segment.compute)
        prefetched = id(segment) if segment.prefetched else 0
        return _Part(seconds, segment.before_forward, segment.after_forward, (), prefetched)

    def _backward_part(self, kind: str, segment: LocalSegment) -> _Part:
        forward_s, backward_s = self.timer.share(segment.work, self.samples, segment.compute)
        half = 1.0 if kind == "B" else 0.5
        # Both halves of a backward pass compute a recomputed unit again.
        seconds = half * backward_s + segment.again * forward_s
        if kind == "W":  # messages have gone after the first half
            return _Part(seconds, (), (), segment.beside)
        beside = segment.beside if kind == "B" else ()
        return _Part(seconds, segment.before_backward, segment.after_backward, beside)

    def _wait_for(self, rank: int, messages: Iterable[SentMessage]) -> list[int]:
        """Add messages between two stretches of computing; sends travel while the rank goes on."""
        sends = []
        for message in filter(self._seconds, messages):
            after = self._flush(rank)
            index = self._message(rank, message, (after,))
            if message.kind == "send":
                sends.append(index)
            else:
                self.last[rank] = (index,)
        return sends

    def _message(self, rank: int, message: SentMessage, after: tuple[int, ...]) -> int:
        queue = f"rank {rank} sends" if message.kind == "send" else f"rank {rank} messages"
        label = f"{message.kind} ({message.axis})"
        # What a stage sends to the next one leaves by its own link, beside its other messages.
        link = f"rank {rank} link"
        return self._add(StepTask(queue, self._seconds(message), after, (link,), label))

    def _seconds(self, message: SentMessage) -> float:
        """Return the seconds of a message alone, with what an engine does around it."""
        if message not in self.seconds:
            moved, memory = message.passes * message.size_bytes, self.timer.speeds.memory
            copied_s = moved / memory.at(moved) * self.timer.crowding if moved else 0.0
            around_s = copied_s + self._overhead_s(message.around)
            self.seconds[message] = (
                self.network.seconds(message, self.step) + message.share * around_s
            )
        return self.seconds[message]

    def _overhead_s(self, around: Overheads) -> float:
        return self.timer.speeds.overhead_s(around) * self.timer.crowding

    def _prefetch(self, rank: int) -> None:
        for segment in self.step.segments_of_rank(rank):
            if segment.prefetched:
                self.prefetched[id(segment)] = tuple(
                    self._message(rank, message, ()) for message in segment.prefetched
                )

    def _finish(self, rank: int) -> None:
        self._flush(rank)
        self.last[rank] = (*self.last[rank], *self.beside[rank])
        self._wait_for(rank, self.step.after_passes.get(rank, ()))
        optimizer_s = self.timer.optimizer(self.step)
        index = self._add(
            StepTask(f"rank {rank} compute", optimizer_s, self.last[rank], (), "optimizer")
        )
        self.last[rank] = (index,)
        self._wait_for(rank, self.step.after_step.get(rank, ()))

    def _flush(self, rank: int) -> int:
        """Turn the computing since the last message into one task; return the rank's last one."""
        seconds = self.pending_s.pop(rank, 0.0)
        if not seconds and len(self.last[rank]) == 1:
            return self.last[rank][0]
        index = self._add(StepTask(f"rank {rank} compute", seconds, self.last[rank]))
        self.last[rank] = (index,)
        return index

    def _add(self, task: StepTask) -> int:
        self.made.append(task)
        return len(self.made) - 1


def _critical_path(tasks: list[StepTask], timeline: Timeline) -> dict[str, float]:
    """Walk back from the last end, always to what ended last before a start; sum by label."""
    before: dict[str, int] = {}
    previous: list[tuple[int, ...]] = []
    for index, task in enumerate(tasks):
        in_queue = (before[task.queue],) if task.queue in before else ()
        previous.append((*task.after, *in_queue))
        before[task.queue] = index
    seconds: dict[str, float] = defaultdict(float)
    index = max(range(len(tasks)), key=lambda i: timeline.ends[i])
    while True:
        seconds[tasks[index].label] += timeline.ends[index] - timeline.starts[index]
        if not previous[index]:
            return dict(seconds)
        index = max(previous[index], key=lambda i: timeline.ends[i])
