"""A deterministic simulator of tasks that wait for each other and share links.

queue   tasks of one queue run one at a time, in order: a rank's operations, its messages
link    tasks of several queues that use one link at once get equal shares of it

rank 0 compute   ▓▓▓▓▓▓▓▓▓▓▓▓▓▓
rank 0 messages      ▒▒▒▒▒▒▒▒▒▒▒▒      shares the link with rank 1's from here ...
rank 1 messages            ▒▒▒▒▒▒      ... to here, so both take twice as long meanwhile
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
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
    """The state of a simulation: tasks that run, and tasks that wait in their queues."""

    def __init__(self, tasks: Sequence[StepTask], slowdowns: Slowdowns) -> None:
        self.tasks = tasks
        self.slowdowns = slowdowns
        self.now_s = 0.0
        self.starts = [0.0] * len(tasks)
        self.ends = [0.0] * len(tasks)
        self.queues: dict[str, deque[int]] = defaultdict(deque)
        self.waits_for = [len(task.after) for task in tasks]
        self.unblocks: dict[int, list[int]] = defaultdict(list)
        self.remaining_s: dict[int, float] = {}  # of the tasks that run
        self.active_queues: set[str] = set()
        for index, task in enumerate(tasks):
            self.queues[task.queue].append(index)
            for earlier in task.after:
                self.unblocks[earlier].append(index)

    def run(self) -> Timeline:
        ended = 0
        self._start(self.queues)
        while self.remaining_s:
            rates = self._rates()
            step_s = min(left / rates[index] for index, left in self.remaining_s.items())
            self.now_s += step_s
            finished = []
            for index in self.remaining_s:
                self.remaining_s[index] -= step_s * rates[index]
                if self.remaining_s[index] <= 1e-15 * (1 + self.tasks[index].work_s):
                    finished.append(index)
            ended += len(finished)
            self._finish(finished)
        if ended < len(self.tasks):
            raise ValueError(f"{len(self.tasks) - ended} tasks wait for each other and never begin")
        return Timeline(tuple(self.starts), tuple(self.ends))

    def _start(self, queues: Sequence[str] | Mapping[str, object]) -> None:
        """Start the first task of each idle queue, if it waits for nothing."""
        for queue in queues:
            waiting = self.queues[queue]
            if queue not in self.active_queues and waiting and not self.waits_for[waiting[0]]:
                index = waiting.popleft()
                self.active_queues.add(queue)
                self.starts[index] = self.now_s
                self.remaining_s[index] = self.tasks[index].work_s

    def _finish(self, finished: Sequence[int]) -> None:
        touched = []
        for index in finished:
            del self.remaining_s[index]
            self.ends[index] = self.now_s
            queue = self.tasks[index].queue
            self.active_queues.discard(queue)
            touched.append(queue)
            for later in self.unblocks[index]:
                self.waits_for[later] -= 1
                touched.append(self.tasks[later].queue)
        self._start(touched)

    def _rates(self) -> dict[int, float]:
        """Return seconds of work that each running task does in a second."""
        users = Counter(link for index in self.remaining_s for link in self.tasks[index].links)
        rates = {}
        for index in self.remaining_s:
            task = self.tasks[index]
            shared = max((users[link] for link in task.links), default=1)
            other, factor = self.slowdowns.get(task.queue, ("", 1.0))
            slow = factor if other in self.active_queues else 1.0
            rates[index] = 1.0 / (shared * slow)
        return rates
