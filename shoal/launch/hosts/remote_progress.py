"""The progress of ranks on several hosts, as the driver knows it from messages of their agents.

No clock of a host is read here. An agent says how much time has passed between two of its looks,
and the time since which a word has not changed is the driver's own, from the receipt of the word.

A host that is silent counts no time: it is the lease that judges it. So a rank that cannot be seen
is never called late, nor is one that waits for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from shoal.launch.hosts.agent_messages import Message
from shoal.launch.hosts.progress_messages import changed
from shoal.launch.progress_source import Halt, Look
from shoal.watchdog.look_clock import MAX_LOOK_S
from shoal.watchdog.progress_word import ProgressWord, RankProgress
from shoal.watchdog.progress_writer import now_ns

HALTS: tuple[Halt, ...] = ("", "stopped", "traced")


class ReceivedProgress:
    """The words that agents have sent in one epoch.

    Args:
        hosts: the ranks of each host that has some.
    """

    def __init__(self, hosts: Mapping[int, range]) -> None:
        self._hosts = hosts
        self._progress: dict[int, RankProgress] = {}  # as agents have sent it
        self._words: dict[int, ProgressWord] = {}  # with the driver's time of their receipt
        self._alive: dict[int, list[int]] = {}
        self._passed_s: defaultdict[int, float] = defaultdict(float)
        self._halts: dict[int, Halt] = {}

    def receive(self, host: int, message: Message, now_ns: int) -> None:
        """Take a message of a host's agent, of the kind "progress" or "looked".

        Args:
            now_ns: the driver's time.

        Raises:
            KeyError, TypeError, ValueError: no agent sends this.
        """
        if message["do"] == "progress":
            rank = self._rank(host, message["rank"])
            before = self._progress.get(rank)
            after = self._progress[rank] = changed(before, message)
            if before is None or before.word != after.word:
                self._words[rank] = after.word._replace(since_ns=now_ns)
            return
        alive = [self._rank(host, rank) for rank in message["ranks"]]
        if not set(alive) <= self._words.keys():
            raise ValueError("a look without the words of its ranks")
        self._alive[host] = alive
        self._passed_s[host] += min(max(float(message["passed_s"]), 0.0), MAX_LOOK_S)
        self._halts[host] = HALTS[HALTS.index(message["halt"])]

    def lost(self, host: int) -> None:
        """Forget the ranks of a host that is lost."""
        self._alive.pop(host, None)
        self._halts.pop(host, None)

    def look(self) -> Look:
        """Return the progress of the ranks that live, with the times since the last call."""
        progress: dict[int, RankProgress] = {}
        passed_s: dict[int, float] = {}
        for host, ranks in self._alive.items():
            for rank in ranks:
                each = self._progress[rank]
                progress[rank] = RankProgress(
                    self._words[rank], each.calls, each.groups, each.steps, each.pacing, each.stage
                )
                passed_s[rank] = min(self._passed_s[host], MAX_LOOK_S)
        self._passed_s.clear()
        return Look(progress, passed_s, self._halt())

    def _halt(self) -> Halt:
        halts = [self._halts[host] for host, ranks in self._alive.items() if ranks]
        if "traced" in halts:
            return "traced"
        return "stopped" if halts and all(halt == "stopped" for halt in halts) else ""

    def _rank(self, host: int, value: object) -> int:
        if type(value) is not int or value not in self._hosts[host]:
            raise ValueError(f"rank {value!r} is none of this host")
        return value


class RemoteProgress:
    """The progress of an epoch's ranks, and the way to the agents; a ProgressSource.

    Args:
        hosts: the ranks of each host.
        hang_limit_s: the limit after which a rank is late; 0 for none.
        name: returns the name of a host.
        ask_stacks: asks a host's agent for the stacks of a rank, and returns what it says.
        tell_slow: lets the ranks of a host know that a rank is slow.
    """

    def __init__(
        self,
        hosts: Mapping[int, range],
        hang_limit_s: float,
        name: Callable[[int], str],
        ask_stacks: Callable[[int, int], str],
        tell_slow: Callable[[int, int], None],
    ) -> None:
        self.hang_limit_s = hang_limit_s
        self.received = ReceivedProgress(hosts)
        self._name, self._ask_stacks, self._tell_slow = name, ask_stacks, tell_slow
        self._host_of = {rank: host for host, ranks in hosts.items() for rank in ranks}

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self._host_of)

    def receive(self, host: int, message: Message) -> None:
        """Take a message of a host's agent now. Raises as `ReceivedProgress.receive` does."""
        self.received.receive(host, message, now_ns())

    def look(self) -> Look:
        """Return the progress of the ranks that live."""
        return self.received.look()

    def name_slow(self, rank: int) -> None:
        """Let the ranks of all hosts know that one of them is slow, for their log."""
        for host in set(self._host_of.values()):
            self._tell_slow(host, rank)

    def host(self, rank: int) -> str:
        """Return the name of the rank's host."""
        return self._name(self._host_of[rank])

    def stacks(self, rank: int) -> str:
        """Return the stacks of all threads of a rank, as its agent tells them."""
        return self._ask_stacks(self._host_of[rank], rank)
