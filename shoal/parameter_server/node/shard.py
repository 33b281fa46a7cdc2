"""A server's mind: what comes in, what goes out, and nothing that waits. No sockets, no threads, no
clocks of the wall.

    synchronous (staleness 0)                            stale
      push of worker 0 ┐                                   push of worker w, and its order to step
      push of worker 1 ┴─ sum, in the order of workers       │ apply at once: each push is a step
      everyone's order   ─┴─ apply ── value to everyone      └ value, once nobody is more than s steps behind

Every push is applied exactly once: a part knows how many steps it has taken (of each worker, where
stale), and a push that comes again, because an answer was lost, is answered and not applied. That
is a window of one step.

    primary ── Applied ──> backup       A worker is answered when every backup has the update too; a backup that takes
       ^───── acknowledged ──┘          over has lost nothing that a worker was told of.

Parts come and go: one that is away, or not yet here for good, is answered by nobody, and workers
say again what they have said of it to whoever answers for it next. A step is taken from the orders
that every shard has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.parameter_server.events import (
    Acknowledged,
    GradientUpdate,
    InstallSnapshot,
    InSync,
    LoadDone,
    NotOwner,
    Outgoing,
    PartitionTransfer,
    ProtocolViolation,
    PullResponse,
    ReplicateUpdate,
    StepRequest,
    TransferDone,
)
from shoal.parameter_server.node.aggregation import GradientQuery, GradientSum, Push, respond
from shoal.parameter_server.node.event_log import Event, EventLog
from shoal.parameter_server.node.partition_state import PartitionState
from shoal.parameter_server.node.replication_acks import AckTracker
from shoal.parameter_server.optimizer_spec import OptimizerSpec
from shoal.parameter_server.partitioning import Partition
from shoal.parameter_server.sparse_blocks import changed


class Shard:
    """The parts of one server.

    Args: parts: all of the model, by number. workers: the numbers of those who push. staleness: how
        many steps a worker may be ahead of the slowest; 0 for synchronous steps, None for any.
        mine: the numbers of the parts for which it answers at the beginning; all, if not given.
        memory: where a part's values are to lie. snapshot: copies a part's values for one worker,
        where they may change before it has read them.

    Attributes: held: what is here, be it to answer or to be given, by number. mine: for which it
        answers, once they are held and unless they are away. away: which are on their way to
        another shard. backups: what they hold, and what is said only when they hold it. coming:
        which are on their way here, and since when; any other that is given is of a move that is
        over. history: what was applied and read since `record`; None before.
    """

    def __init__(
        self,
        parts: Sequence[Partition],
        recipe: OptimizerSpec,
        workers: Iterable[int],
        staleness: int | None = 0,
        *,
        mine: Iterable[int] | None = None,
        memory: Callable[[Partition], Tensor | None] = lambda _: None,
        snapshot: Callable[[int, int, Tensor], Tensor] = lambda _worker, _part, values: (
            values.clone()
        ),
    ) -> None:
        self.parts, self.recipe = {part.number: part for part in parts}, recipe
        self._memory, self._snapshot = memory, snapshot
        self.workers, self.staleness = sorted(workers), staleness
        self.owned = set(self.parts) if mine is None else set(mine)
        self.leaving: set[int] = set()
        self.arriving: Mapping[int, int] = {}
        self.held: dict[int, PartitionState] = {}
        self.done: dict[int, dict[int, int]] = {}
        self.orders: dict[int, tuple[int, StepRequest]] = {}
        self.sums: dict[int, GradientSum] = {}
        self.pushed: dict[tuple[int, int], Push] = {}
        self.readers: dict[int, dict[int, int]] = {}
        self.asked: list[GradientQuery] = []
        self.backups = AckTracker()
        self.changed: dict[int, tuple[int, Tensor]] = {}
        self.seen: Counter[int] = Counter()
        self.history: EventLog | None = None

    def require_partition(self, part: int) -> PartitionState:
        """A part for which this shard answers. Raises Elsewhere, or Refused where there is no
        such part.
        """
        if part not in self.parts:
            raise ProtocolViolation(f"part {part} is none of {len(self.parts)}")
        if part not in self.held or part not in self.owned or part in self.leaving:
            raise NotOwner(part)
        return self.held[part]

    def _allocate(self, part: int) -> PartitionState:
        """Make room for a part, unless it has some."""
        if part not in self.parts:
            raise ProtocolViolation(f"part {part} is none of {len(self.parts)}")
        if part not in self.held:
            layout = self.parts[part]
            self.held[part] = PartitionState(layout, self.recipe, self._memory(layout))
        return self.held[part]

    def _begin(self, part: int, done: Mapping[int, int]) -> None:
        """Forget what was said of a part: it is at another step now."""
        self.done[part], self.sums[part] = dict(done), GradientSum()
        self.backups.begin(part)
        self.readers[part] = {}
        self.changed.pop(part, None)
        self.pushed = {key: push for key, push in self.pushed.items() if key[1] != part}
        self.asked = [question for question in self.asked if question.part != part]

    def _filled(self, backup: int, part: int) -> InstallSnapshot:
        """The backup has it when it acknowledges this clock, and nothing older counts."""
        held = self.held[part]
        self.backups.fill(backup, part)
        return InstallSnapshot(
            backup,
            part,
            held.clock,
            held.values.clone(),
            _copied(held.state()),
            dict(self.done[part]),
        )

    def record(self) -> None:
        """Note from now on what is applied and read, where it is not yet noted."""
        self.history = self.history or EventLog()

    def _note(self, event: Event) -> None:
        if self.history is not None:
            self.history.add(event)

    # Parts that come and go

    def set_ownership(
        self, mine: set[int], away: set[int], coming: Mapping[int, int]
    ) -> dict[int, dict[int, int]]:
        """Answer for these parts, as soon as they are held, and not for those that are away.

        Returns:
            The parts that were let go of, and how many steps of each worker they included.
        """
        self.owned, self.leaving, self.arriving = mine, away, coming
        gone = {
            part: self.done[part] for part in self.held if part not in mine and part not in coming
        }
        for part in gone:
            self._begin(part, {})
            self.backups.forget(part)
            for table in (self.held, self.done, self.sums, self.readers):
                del table[part]
        return gone

    def all_workers_read(self, done: Mapping[int, int]) -> bool:
        """Whether every worker has used values that include so many of its steps."""
        return all(self.orders.get(worker, (-1,))[0] >= steps for worker, steps in done.items())

    def export_partition(self, part: int) -> PartitionTransfer | None:
        """A part that is away, if it is here, as it stays until it is let go of."""
        if part not in self.leaving or part not in self.held:
            return None
        held = self.held[part]
        self._begin(part, self.done[part])
        return PartitionTransfer(
            part, held.clock, held.values.clone(), _copied(held.state()), dict(self.done[part])
        )

    def import_partition(self, given: PartitionTransfer, since: int, giver: int) -> list[Outgoing]:
        """Take a part in. Said to be here when every backup has it too; answered for when
        `place` says so.
        """
        if self.arriving.get(given.part) != since:
            return []
        held = self._allocate(given.part)
        held.load(given.values, list(given.state), given.clock)
        self._begin(given.part, given.steps_by_worker)
        filled = self._fill_backups(given.part)
        here = TransferDone(given.part, since, giver)
        return [*filled, *self.backups.hold(given.part, held.clock, [here])]

    def _fill_backups(self, part: int) -> list[Outgoing]:
        self.backups.cap_clock(part, self.held[part].clock - 1)
        return [self._filled(backup, part) for backup in self.backups.clocks]

    # What workers say

    def load(
        self, worker: int, part: int, values: Tensor, state: list[Mapping[str, Any]], clock: int
    ) -> list[Outgoing]:
        """Begin at these numbers; `clock` steps were taken before. Answered when every backup
        has them too.
        """
        if part in self.owned and part not in self.leaving:
            self._allocate(part)
        held = self.require_partition(part)
        held.load(values, state, clock)
        self._begin(part, dict.fromkeys(self.workers, clock))
        return [
            *self._fill_backups(part),
            *self.backups.hold(part, held.clock, [LoadDone(worker, part)]),
        ]

    def push(
        self,
        worker: int,
        step: int,
        part: int,
        gradient: Tensor,
        present: bytes,
        sparse: bool = False,
    ) -> list[Outgoing]:
        """A worker's gradient of a part. It keeps the tensor until the step is taken. `sparse`:
        most of it is zeros.
        """
        held = self.require_partition(part)
        if worker not in self.done[part]:
            raise ProtocolViolation(f"worker {worker} is none of {self.workers}")
        if len(present) != len(held.part.segments) or gradient.shape != held.values.shape:
            raise ProtocolViolation(f"a gradient of part {part} has another shape than the part")
        done = self.done[part][worker]
        if step > done:
            raise ProtocolViolation(
                f"worker {worker} pushes step {step} of part {part} before step {done}"
            )
        if step < done:  # it did not hear the answer
            return self.backups.hold(part, held.clock, self._read(worker, part))
        if self.staleness == 0:
            self.sums[part].add(worker, Push(step, gradient, present, sparse), self.workers)
            return [*self._answer_queries(part), *self._step_sync(part)]
        self.pushed[worker, part] = Push(step, gradient, present)
        return self._step_async(worker, part)

    def request_step(self, worker: int, step: int, order: StepRequest) -> Iterator[Outgoing]:
        """What a worker's step is to be; it has done its backward pass, so new values cannot
        disturb it.

        Synchronous steps wait for everyone's, and take the one of the first worker.

        Returns: what is to be said, to be read to its end: a part is stepped when it is asked for,
            so that the values of one are on their way while the next one is stepped.
        """
        self.orders[worker] = (step, order)
        here = sorted((self.owned & set(self.held)) - self.leaving)
        if self.staleness == 0:
            return (out for part in here for out in self._step_sync(part))
        return (out for part in here for out in self._step_async(worker, part))

    def query_gradient(self, worker: int, step: int, part: int, whole: bool) -> list[Outgoing]:
        """Asks for the sum of gradients of a part in this step, `whole` or the sum of their
        squares.

        Answered when every worker has pushed, so before the order to step; in synchronous steps
        only."""
        self.require_partition(part)
        self.asked.append(GradientQuery(worker, step, part, whole))
        return self._answer_queries(part)

    def pull(self, worker: int, part: int) -> list[Outgoing]:
        """Asks for the newest values, as they are: the workers have agreed on a moment when
        nobody pushes.
        """
        held, done = self.require_partition(part), self.done[part]
        self._note(Event("p", part, held.clock, worker, done[worker]))
        numbers = self._snapshot(worker, part, held.values)
        value = PullResponse(worker, part, done[worker], min(done.values()), numbers)
        return self.backups.hold(part, held.clock, [value])

    # What replicas say

    def add_backup(self, backup: int, in_sync: bool = False) -> list[Outgoing]:
        """A replica is filled, and told of every update from now on.

        Args: in_sync: it may take over at any moment, so nobody is answered before it has been
        filled."""
        self.backups.expect(
            backup, {number: -1 if in_sync else held.clock for number, held in self.held.items()}
        )
        filled = [self._filled(backup, part) for part in self.held]
        return [*filled, *([] if filled else [InSync(backup)])]

    def await_backup(self, backup: int) -> None:
        """Nobody is answered before this replica has said what it holds."""
        self.backups.expect(backup, dict.fromkeys(self.held, -1))

    def remove_backup(self, backup: int) -> list[Outgoing]:
        """It is gone: nobody waits for it any more."""
        self.backups.remove(backup)
        return [out for part in self.held for out in self.backups.take_released(part)]

    def on_ack(self, backup: int, part: int, clock: int, filled: bool = False) -> list[Outgoing]:
        """A backup has all updates of a part before `clock`, be it told of them or filled."""
        if backup not in self.backups.clocks or part not in self.held:
            return []
        return self.backups.acknowledged(backup, part, clock, filled)

    def install_snapshot(self, filled: InstallSnapshot) -> list[Outgoing]:
        """As a backup: take a whole part."""
        self._allocate(filled.part).load(filled.values, list(filled.state), filled.clock)
        self._begin(filled.part, filled.steps_by_worker)
        return [Acknowledged(filled.part, filled.clock)]

    def apply_replicated(self, applied: ReplicateUpdate) -> list[Outgoing]:
        """As a backup: apply what the primary applied."""
        held = self.held.get(applied.part)
        if held is None:  # it was let go of since
            return [Acknowledged(applied.part, applied.clock + 1)]
        if applied.clock > held.clock:
            raise ProtocolViolation(
                f"update {applied.clock} of part {applied.part} came before update {held.clock}"
            )
        if applied.clock == held.clock:
            update = applied.update
            held.apply(update.gradient, update.grad_mask, applied.settings)
            self._count(applied.part, update.worker, update.step)
        return [Acknowledged(applied.part, held.clock)]

    # How steps are taken

    def _step_sync(self, part: int) -> list[Outgoing]:
        held, sum_ = self.held[part], self.sums[part]
        ordered = all(self.orders.get(worker, (-1,))[0] == held.clock for worker in self.workers)
        if not ordered or len(sum_.added) < len(self.workers):
            return []
        step, order = self.orders[self.workers[0]]
        self.sums[part] = GradientSum(sum_.memory)
        before = held.values.clone() if sum_.sparse else None
        told = self._apply(part, GradientUpdate(-1, step, sum_.total(), sum_.present), order)
        self.changed.pop(part, None)
        if before is not None:
            self.changed[part] = (held.clock, changed(before, held.values))
        answers = [out for worker in self.workers for out in self._read(worker, part)]
        return [*told, *self.backups.hold(part, held.clock, answers)]

    def _step_async(self, worker: int, part: int) -> list[Outgoing]:
        push = self.pushed.get((worker, part))
        step, order = self.orders.get(worker, (-1, None))
        if push is None or order is None or step != push.step:
            return []
        del self.pushed[worker, part]
        update = GradientUpdate(worker, step, push.gradient, push.present)
        told = self._apply(part, update, order)
        self.readers[part][worker] = step + 1
        return [*told, *self.backups.hold(part, self.held[part].clock, self._release_reads(part))]

    def _apply(self, part: int, update: GradientUpdate, order: StepRequest) -> list[Outgoing]:
        held = self.held[part]
        settings = order.settings[held.part.group]
        if order.scale != 1.0:
            update = update._replace(gradient=update.gradient * order.scale)
        clock = held.clock
        held.apply(update.gradient, update.grad_mask, settings)
        self._count(part, update.worker, update.step)
        self._note(Event("a", part, clock, update.worker, update.step))
        return [
            ReplicateUpdate(backup, part, clock, update, settings) for backup in self.backups.clocks
        ]

    def _count(self, part: int, worker: int, step: int) -> None:
        done = self.done[part]
        for number in self.workers if worker < 0 else [worker]:
            done[number] = step + 1

    # Who may read what

    def _release_reads(self, part: int) -> list[Outgoing]:
        """Answers to those whose read has become allowed."""
        oldest = min(self.done[part].values())
        allowed = [
            w
            for w, c in self.readers[part].items()
            if self.staleness is None or oldest >= c - self.staleness
        ]
        return [out for worker in sorted(allowed) for out in self._read(worker, part)]

    def _read(self, worker: int, part: int) -> list[Outgoing]:
        held, done = self.held[part], self.done[part]
        clock, oldest = done[worker], min(done.values())
        if self.staleness is not None and oldest < clock - self.staleness:
            self.readers[part][worker] = clock
            return []
        self.readers[part].pop(worker, None)
        self.seen[clock - oldest] += 1
        self._note(Event("r", part, held.clock, worker, clock))
        # Nobody can change them before everyone has read them, where steps are synchronous.
        numbers = held.values if self.staleness == 0 else self._snapshot(worker, part, held.values)
        at, blocks = self.changed.get(part, (-1, None))
        return [
            PullResponse(worker, part, clock, oldest, numbers, blocks if at == held.clock else None)
        ]

    def _answer_queries(self, part: int) -> list[Outgoing]:
        """Answers to what was asked of the sum of a part, once it is complete."""
        held, sum_ = self.held[part], self.sums[part]
        if len(sum_.added) < len(self.workers):
            return []
        ready = [
            question
            for question in self.asked
            if question.part == part and question.step == held.clock
        ]
        self.asked = [question for question in self.asked if question not in ready]
        return [respond(question, sum_) for question in ready]


def _copied(state: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in kept.items()}
        for kept in state
    ]
