"""A server's mind: what comes in, what goes out, and nothing that waits. No sockets, no threads, no clocks of the wall.

    synchronous (staleness 0)                            stale
      push of worker 0 ┐                                   push of worker w, and its order to step
      push of worker 1 ┴─ sum, in the order of workers       │ apply at once: each push is a step
      everyone's order   ─┴─ apply ── value to everyone      └ value, once nobody is more than s steps behind

Every push is applied exactly once: a part knows how many steps it has taken (of each worker, where stale), and a push
that comes again, because an answer was lost, is answered and not applied. That is a window of one step.

    primary ── Applied ──> backup       A worker is answered when every backup has the update too; a backup that takes
       ^───── acknowledged ──┘          over has lost nothing that a worker was told of.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.server.held import Held
from shoal.server.layout import Part
from shoal.server.recipe import Recipe, Settings


class Order(NamedTuple):
    """What a worker says once for each step, to every server."""

    settings: list[Settings]  # of each optimizer group
    scale: float = 1.0  # by which gradients are multiplied before the step: clipping, a count known late


class Value(NamedTuple):
    """A part's new numbers, for one worker."""

    worker: int
    part: int
    clock: int  # steps of this worker that they include
    oldest: int  # steps of the slowest worker that they include
    numbers: Tensor


class Norm(NamedTuple):
    """Sum of the squares of all gradients here, for one worker."""

    worker: int
    step: int
    squared: float


class Gradient(NamedTuple):
    """The sum of all gradients of a part, for one worker."""

    worker: int
    part: int
    numbers: Tensor
    present: bytes


class Applied(NamedTuple):
    """An update, for a backup to repeat."""

    backup: int
    part: int
    clock: int  # before it
    worker: int  # whose push it was; -1 for the sum of all
    step: int
    gradient: Tensor
    present: bytes
    settings: Settings


class Filled(NamedTuple):
    """A whole part, for a backup that begins."""

    backup: int
    part: int
    clock: int
    values: Tensor
    state: list[dict[str, Any]]
    done: dict[int, int]


class Loaded(NamedTuple):
    """A part is as a worker has asked for."""

    worker: int
    part: int


class Acknowledged(NamedTuple):
    """A backup holds all updates of a part before `clock`."""

    part: int
    clock: int


Out = Value | Norm | Gradient | Loaded | Applied | Filled | Acknowledged


class Refused(Exception):
    """A message that contradicts what is known; the connection is to be closed."""


class Push(NamedTuple):
    """A worker's gradient of one part."""

    step: int
    gradient: Tensor
    present: bytes


@dataclass
class Sum:
    """Gradients of one step of one part, added up in the order of workers. Pushed ones are read and never changed.

    Args: memory: of the part's length, for the sum; used again in the next step.
    """

    memory: Tensor | None = None
    waiting: dict[int, Push] = field(default_factory=dict)
    added: list[int] = field(default_factory=list)
    first: Tensor | None = None
    present: bytes = b""

    def add(self, worker: int, push: Push, workers: Sequence[int]) -> None:
        """Take a push; add what is next in order."""
        if worker in self.added:
            return
        self.waiting[worker] = push
        for number in workers[len(self.added) :]:
            if number not in self.waiting:
                return
            found = self.waiting.pop(number)
            if self.first is None:
                self.first, self.present = found.gradient, found.present
            else:
                self._add(found.gradient)
                self.present = bytes(map(max, self.present, found.present))
            self.added.append(number)

    def _add(self, gradient: Tensor) -> None:
        assert self.first is not None
        if self.memory is None:
            self.memory = torch.empty_like(self.first)
        torch.add(self.first if len(self.added) == 1 else self.memory, gradient, out=self.memory)

    def total(self) -> Tensor:
        """The sum of what was added, which is at least one."""
        total = self.first if len(self.added) == 1 else self.memory
        assert total is not None
        return total


@dataclass
class Awaited:
    """Answers that are held back until backups have acknowledged up to `clock`."""

    clock: int
    answers: list[Out]


class Shard:
    """The parts of one server.

    Args:
        parts: those that it owns, by number.
        workers: the numbers of those who push.
        staleness: how many steps a worker may be ahead of the slowest; 0 for synchronous steps, None for any.
        memory: where a part's values are to lie.
        snapshot: copies a part's values for one worker, where they may change before it has read them.
    """

    def __init__(
        self,
        parts: Iterable[Part],
        recipe: Recipe,
        workers: Iterable[int],
        staleness: int | None = 0,
        *,
        memory: Callable[[Part], Tensor | None] = lambda _: None,
        snapshot: Callable[[int, int, Tensor], Tensor] = lambda _worker, _part, values: values.clone(),
    ) -> None:
        self.held = {part.number: Held(part, recipe, memory(part)) for part in parts}
        self._snapshot = snapshot
        self.workers, self.staleness = sorted(workers), staleness
        self.done = {number: dict.fromkeys(self.workers, 0) for number in self.held}
        self.orders: dict[int, tuple[int, Order]] = {}
        self.sums: dict[int, Sum] = {number: Sum() for number in self.held}
        self.pushed: dict[tuple[int, int], Push] = {}
        self.readers: dict[int, dict[int, int]] = {number: {} for number in self.held}
        self.asked: list[tuple[int, int, int | None]] = []
        self.backups: dict[int, dict[int, int]] = {}
        self.awaited: dict[int, deque[Awaited]] = {number: deque() for number in self.held}
        self.seen: Counter[int] = Counter()
        self.history: list[tuple[int, int, int]] | None = None

    def _filled(self, backup: int, held: Held) -> Filled:
        number = held.part.number
        done = dict(self.done[number])
        return Filled(backup, number, held.clock, held.values.clone(), _copied(held.state()), done)

    def held_part(self, part: int) -> Held:
        """A part that is here. Raises Refused."""
        if part not in self.held:
            raise Refused(f"part {part} is not held here")
        return self.held[part]

    # What workers say

    def load(self, worker: int, part: int, values: Tensor, state: list[Mapping[str, Any]], clock: int) -> list[Out]:
        """Begin at these numbers; `clock` steps were taken before. Answered when every backup has them too."""
        held = self.held_part(part)
        held.load(values, state, clock)
        self.done[part] = dict.fromkeys(self.workers, clock)
        self.sums[part] = Sum()
        for clocks in self.backups.values():
            clocks[part] = clock - 1
        filled = [self._filled(backup, held) for backup in self.backups]
        return [*filled, *self._hold(part, [Loaded(worker, part)])]

    def push(self, worker: int, step: int, part: int, gradient: Tensor, present: bytes) -> list[Out]:
        """A worker's gradient of a part. It keeps the tensor until the step is taken."""
        held = self.held_part(part)
        if worker not in self.done[part]:
            raise Refused(f"worker {worker} is none of {self.workers}")
        if len(present) != len(held.part.segments) or gradient.shape != held.values.shape:
            raise Refused(f"a gradient of part {part} has another shape than the part")
        done = self.done[part][worker]
        if step > done:
            raise Refused(f"worker {worker} pushes step {step} of part {part} before step {done}")
        if step < done:  # it did not hear the answer
            return self._hold(part, self._read(worker, part))
        if self.staleness == 0:
            self.sums[part].add(worker, Push(step, gradient, present), self.workers)
            return [*self._told(), *self._step_together(part)]
        self.pushed[worker, part] = Push(step, gradient, present)
        return self._step_alone(worker, part)

    def order(self, worker: int, step: int, order: Order) -> list[Out]:
        """What a worker's step is to be; it has done its backward pass, so new values cannot disturb it.

        Synchronous steps wait for everyone's, and take the one of the first worker.
        """
        self.orders[worker] = (step, order)
        if self.staleness == 0:
            return [out for part in self.held for out in self._step_together(part)]
        return [out for part in self.held for out in self._step_alone(worker, part)]

    def ask(self, worker: int, step: int, part: int | None) -> list[Out]:
        """Asks for the sum of gradients of a part in this step, or, for None, for the sum of all their squares.

        Answered when every worker has pushed, so before the order to step; in synchronous steps only.
        """
        self.asked.append((worker, step, part))
        return self._told()

    def pull(self, worker: int, part: int) -> list[Out]:
        """Asks for the newest values, as they are: the workers have agreed on a moment when nobody pushes."""
        held, done = self.held_part(part), self.done[part]
        numbers = self._snapshot(worker, part, held.values)
        return self._hold(part, [Value(worker, part, done[worker], min(done.values()), numbers)])

    # What replicas say

    def add_backup(self, backup: int, in_sync: bool = False) -> list[Out]:
        """A replica is filled, and told of every update from now on.

        Args: in_sync: it may take over at any moment, so nobody is answered before it has been filled.
        """
        self.expect(backup)
        if not in_sync:
            self.backups[backup] = {number: held.clock for number, held in self.held.items()}
        return [self._filled(backup, held) for held in self.held.values()]

    def expect(self, backup: int) -> None:
        """Nobody is answered before this replica has said what it holds."""
        self.backups[backup] = dict.fromkeys(self.held, -1)

    def remove_backup(self, backup: int) -> list[Out]:
        """It is gone: nobody waits for it any more."""
        self.backups.pop(backup, None)
        return [out for part in self.held for out in self._released(part)]

    def acknowledged(self, backup: int, part: int, clock: int) -> list[Out]:
        """A backup has all updates of a part before `clock`."""
        if backup in self.backups:
            self.backups[backup][part] = max(clock, self.backups[backup].get(part, 0))
        return self._released(part)

    def fill(self, filled: Filled) -> list[Out]:
        """As a backup: take a whole part."""
        self.held_part(filled.part).load(filled.values, list(filled.state), filled.clock)
        self.done[filled.part] = dict(filled.done)
        return [Acknowledged(filled.part, filled.clock)]

    def repeat(self, applied: Applied) -> list[Out]:
        """As a backup: apply what the primary applied."""
        held = self.held_part(applied.part)
        if applied.clock > held.clock:
            raise Refused(f"update {applied.clock} of part {applied.part} came before update {held.clock}")
        if applied.clock == held.clock:
            held.apply(applied.gradient, applied.present, applied.settings)
            self._count(applied.part, applied.worker, applied.step)
        return [Acknowledged(applied.part, held.clock)]

    # How steps are taken

    def _step_together(self, part: int) -> list[Out]:
        held, sum_ = self.held[part], self.sums[part]
        ordered = all(self.orders.get(worker, (-1,))[0] == held.clock for worker in self.workers)
        if not ordered or len(sum_.added) < len(self.workers):
            return []
        step, order = self.orders[self.workers[0]]
        self.sums[part] = Sum(sum_.memory)
        told = self._apply(part, -1, step, sum_.total(), sum_.present, order)
        answers = [out for worker in self.workers for out in self._read(worker, part)]
        return [*told, *self._hold(part, answers)]

    def _step_alone(self, worker: int, part: int) -> list[Out]:
        push = self.pushed.get((worker, part))
        step, order = self.orders.get(worker, (-1, None))
        if push is None or order is None or step != push.step:
            return []
        del self.pushed[worker, part]
        told = self._apply(part, worker, step, push.gradient, push.present, order)
        self.readers[part][worker] = step + 1
        return [*told, *self._hold(part, self._readable(part))]

    def _apply(self, part: int, worker: int, step: int, gradient: Tensor, present: bytes, order: Order) -> list[Out]:
        held = self.held[part]
        settings = order.settings[held.part.group]
        if order.scale != 1.0:
            gradient = gradient * order.scale
        clock = held.clock
        held.apply(gradient, present, settings)
        self._count(part, worker, step)
        if self.history is not None:
            self.history.append((part, worker, step))
        return [Applied(b, part, clock, worker, step, gradient, present, settings) for b in self.backups]

    def _count(self, part: int, worker: int, step: int) -> None:
        done = self.done[part]
        for number in self.workers if worker < 0 else [worker]:
            done[number] = step + 1

    # Who may read what

    def _readable(self, part: int) -> list[Out]:
        """Answers to those whose read has become allowed."""
        oldest = min(self.done[part].values())
        allowed = [w for w, c in self.readers[part].items() if self.staleness is None or oldest >= c - self.staleness]
        return [out for worker in sorted(allowed) for out in self._read(worker, part)]

    def _read(self, worker: int, part: int) -> list[Out]:
        held, done = self.held[part], self.done[part]
        clock, oldest = done[worker], min(done.values())
        if self.staleness is not None and oldest < clock - self.staleness:
            self.readers[part][worker] = clock
            return []
        self.readers[part].pop(worker, None)
        self.seen[clock - oldest] += 1
        # Nobody can change them before everyone has read them, where steps are synchronous.
        numbers = held.values if self.staleness == 0 else self._snapshot(worker, part, held.values)
        return [Value(worker, part, clock, oldest, numbers)]

    def _told(self) -> list[Out]:
        answers: list[Out] = []
        for question in list(self.asked):
            worker, step, part = question
            sums = [self._complete(number, step) for number in (self.held if part is None else [part])]
            found = [sum_ for sum_ in sums if sum_ is not None]
            if len(found) < len(sums):
                continue
            self.asked.remove(question)
            if part is None:
                answers.append(Norm(worker, step, sum(float(s.total().double().square().sum()) for s in found)))
            else:
                answers.append(Gradient(worker, part, found[0].total(), found[0].present))
        return answers

    def _complete(self, part: int, step: int) -> Sum | None:
        sum_ = self.sums[part]
        return sum_ if self.held_part(part).clock == step and len(sum_.added) == len(self.workers) else None

    # What waits for backups

    def _hold(self, part: int, answers: list[Out]) -> list[Out]:
        if answers:
            self.awaited[part].append(Awaited(self.held[part].clock, answers))
        return self._released(part)

    def _released(self, part: int) -> list[Out]:
        safe = min((clocks.get(part, 0) for clocks in self.backups.values()), default=self.held[part].clock)
        free: list[Out] = []
        while self.awaited[part] and self.awaited[part][0].clock <= safe:
            free += self.awaited[part].popleft().answers
        return free


def _copied(state: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in kept.items()} for kept in state]
