"""A deterministic simulator of tasks that wait for each other and share links.

queue   tasks of one queue run one at a time, in order: a rank's operations, its messages
link    tasks of several queues that use one link at once get equal shares of it

rank 0 compute   ▓▓▓▓▓▓▓▓▓▓▓▓▓▓
rank 0 messages      ▒▒▒▒▒▒▒▒▒▒▒▒      shares the link with rank 1's from here ...
rank 1 messages            ▒▒▒▒▒▒      ... to here, so both take twice as long meanwhile
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple


class StepTask(NamedTuple):
    """Something that takes time.

    Attributes:
        queue: in which it runs.
        work_s: seconds that it takes alone.
        after: indices of the tasks that must have ended before it begins.
        links: shared with tasks of other queues.
        label: what it is, for timelines: compute, all_reduce, ...
    """

    queue: str
    work_s: float
    after: tuple[int, ...] = ()
    links: tuple[str, ...] = ()
    label: str = "compute"


class Timeline(NamedTuple):
    """Start and end of each task, in seconds."""

    starts: tuple[float, ...]
    ends: tuple[float, ...]

    @property
    def length(self) -> float:
        return max(self.ends, default=0.0)


Slowdowns = Mapping[str, tuple[str, float]]
"""queue -> (other queue, factor): while a task of the other one runs, its tasks take so many times
as long."""


def simulate(tasks: Sequence[StepTask], slowdowns: Slowdowns | None = None) -> Timeline:
    """Return when each task starts and ends.

    Raises: ValueError: tasks wait for each other in a circle, or for one behind them in a queue.
    """
    return _Simulation(tasks, slowdowns or {}).run()


class _Simulation:
    """The state of a simulation: tasks that run, and tasks that wait in their queues.

    Attributes:
        left_s, since_s: of each task that runs, the work that was left, and when.
        rates: seconds of work that it does in a second.
        changes: of its rate, so that ends that were expected before are known as such.
        expected: (end, task, its changes); the earliest is first.
    """

    def __init__(self, tasks: Sequence[StepTask], slowdowns: Slowdowns) -> None:
        self.tasks = tasks
        self.slowdowns = slowdowns
        self.slows = {other: queue for queue, (other, _) in slowdowns.items()}
        self.now_s = 0.0
        self.starts = [0.0] * len(tasks)
        self.ends = [0.0] * len(tasks)
        self.queues: dict[str, deque[int]] = defaultdict(deque)
        self.waits_for = [len(task.after) for task in tasks]
        self.unblocks: dict[int, list[int]] = defaultdict(list)
        self.left_s = [task.work_s for task in tasks]
        self.since_s = [0.0] * len(tasks)
        self.rates = [0.0] * len(tasks)
        self.changes = [0] * len(tasks)
        self.active: dict[str, int] = {}  # queue -> its task that runs
        self.users: dict[str, set[int]] = defaultdict(set)  # link -> tasks that use it
        self.expected: list[tuple[float, int, int]] = []
        for index, task in enumerate(tasks):
            self.queues[task.queue].append(index)
            for earlier in task.after:
                self.unblocks[earlier].append(index)

    def run(self) -> Timeline:
        self._start(self.queues)
        ended = 0
        while self.expected:
            end_s, index, changes = heappop(self.expected)
            if self.changes[index] == changes:
                self.now_s = end_s
                self._finish(index)
                ended += 1
        if ended < len(self.tasks):
            raise ValueError(f"{len(self.tasks) - ended} tasks wait for each other and never begin")
        return Timeline(tuple(self.starts), tuple(self.ends))

    def _start(self, queues: Iterable[str]) -> None:
        """Start the first task of each idle queue, if it waits for nothing."""
        for queue in queues:
            waiting = self.queues[queue]
            if queue not in self.active and waiting and not self.waits_for[waiting[0]]:
                index = waiting.popleft()
                self.active[queue] = index
                self.starts[index] = self.now_s
                self.since_s[index] = self.now_s
                for link in self.tasks[index].links:
                    self.users[link].add(index)
                self._change_rates(index)

    def _finish(self, index: int) -> None:
        task = self.tasks[index]
        del self.active[task.queue]
        self.ends[index] = self.now_s
        for link in task.links:
            self.users[link].discard(index)
        self._change_rates(index)
        for later in self.unblocks[index]:
            self.waits_for[later] -= 1
        self._start([task.queue, *(self.tasks[later].queue for later in self.unblocks[index])])

    def _change_rates(self, index: int) -> None:
        """Change the rates of a task that has started or ended, and of those that it slows."""
        task = self.tasks[index]
        touched = {index}
        for link in task.links:
            touched |= self.users[link]
        if task.queue in self.slows:
            touched.add(self.active.get(self.slows[task.queue], index))
        for each in touched:
            if self.active.get(self.tasks[each].queue) == each:
                self.left_s[each] -= (self.now_s - self.since_s[each]) * self.rates[each]
                self.since_s[each] = self.now_s
                self.rates[each] = self._rate(self.tasks[each])
                self.changes[each] += 1
                end_s = self.now_s + max(self.left_s[each], 0.0) / self.rates[each]
                heappush(self.expected, (end_s, each, self.changes[each]))

    def _rate(self, task: StepTask) -> float:
        """Return seconds of work that a running task does in a second."""
        rate = 1.0
        if task.links:
            rate /= max(len(self.users[link]) for link in task.links)
        if task.queue in self.slowdowns:
            other, factor = self.slowdowns[task.queue]
            rate /= factor if other in self.active else 1.0
        return rate
