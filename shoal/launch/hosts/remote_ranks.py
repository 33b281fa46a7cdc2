"""Ranks on several hosts, as `supervise` and the watchdog see them.

No clock of a host is read by another. An agent counts the silence of its ranks, and says it.
"""

from __future__ import annotations

import base64
import time
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from shoal.errors import LaunchError
from shoal.launch.failure import Failure, from_exit_code
from shoal.launch.hosts.agent_session import Message, clock_s
from shoal.launch.hosts.driver_session import HostEvent
from shoal.launch.hosts.host_connections import HostConnections
from shoal.launch.output import print_note
from shoal.launch.rank_set import RankEvent, RankExited, RankSet
from shoal.watchdog.progress_word import RankProgress, decode_page
from shoal.watchdog.progress_writer import now_ns

STACKS_S = 4.0
"""For an agent that reads the stacks of a rank; that takes it up to a second."""


@dataclass(frozen=True)
class HostRanks:
    """The ranks of one host.

    Args:
        host: its number.
        first: its first rank; the others follow.
        count: the number of its ranks.
    """

    host: int
    first: int
    count: int


def placed(slots: Mapping[int, int], processes: int) -> list[HostRanks]:
    """Return the hosts of so many ranks: each host is filled before the next one gets a rank.

    Args:
        slots: the most ranks of each host, in the order of the hosts; at least `processes` in all.
    """
    placement: list[HostRanks] = []
    first = 0
    for host, most in slots.items():
        if count := min(most, processes - first):
            placement.append(HostRanks(host, first, count))
            first += count
    return placement


class RemoteRank:
    """One rank on another host."""

    def __init__(self, connections: HostConnections, host: int, number: int) -> None:
        self.number = number
        self.host = host
        self.is_alive = True
        self._session = connections.session

    def signal(self, number: int) -> None:
        """Send a signal to the rank's own process, not to its children."""
        if self.is_alive:
            self._session.send(self.host, "signal", rank=self.number, signal=number)


class RemoteRanks(RankSet):
    """All ranks of one start.

    Args:
        connections: the ranks have been started on it.
        placement: the ranks of each host, by rank.
        hang_limit_s: as in RankSet.
        servers: numbers of the hosts that have servers and no rank, and end with the ranks.
    """

    def __init__(
        self,
        connections: HostConnections,
        placement: Sequence[HostRanks],
        hang_limit_s: float = 0.0,
        servers: Collection[int] = (),
    ) -> None:
        self.connections = connections
        self.placement = placement
        self.hang_limit_s = hang_limit_s
        self.servers = servers
        self._lost_servers: set[int] = set()
        self.all = [
            RemoteRank(connections, share.host, share.first + index)
            for share in placement
            for index in range(share.count)
        ]
        self._looks: dict[
            int, dict[int, RankProgress]
        ] = {}  # of each host, since all were given to the watchdog

    def watch(self, timeout_s: float | None, sources: Sequence[Any] = ()) -> list[RankEvent]:
        timeout_s = inf if timeout_s is None else timeout_s
        events: list[RankEvent] = []
        for event in self.connections.pump(timeout_s, sources):
            events += self._rank_events(event)
        if not self.alive:
            self.connections.printer.flush()
        return events

    def pause(self) -> None:
        """Refuse Ctrl-Z: a driver that stands still does not answer, and its ranks end."""
        print_note(
            "a run on several hosts cannot be stopped by Ctrl-Z and go on later. Ctrl-C ends it, "
            "and the same command resumes it"
        )

    def look(self) -> dict[int, RankProgress]:
        """Return the progress of the ranks that live, once all hosts have told it, and else none.

        So a rank that cannot be seen is never called late, nor is one that waits for it: the lease
        judges its host.
        """
        hosts = {rank.host for rank in self.alive}
        if not hosts <= self._looks.keys():
            return {}
        looks, self._looks = [self._looks[host] for host in hosts], {}
        return {rank: each for look in looks for rank, each in look.items()}

    def host(self, rank: int) -> str:
        return self.connections.name(self.all[rank].host)

    def stacks(self, rank: int) -> str:
        host = self.all[rank].host
        try:
            answer = self.connections.ask({host: {"question": "stacks", "rank": rank}}, STACKS_S)
        except LaunchError as error:
            return f"The stack of rank {rank} is not known: {error}"
        return str(answer[host]["text"])

    def kill(self) -> None:
        """Kill all ranks, and wait until none can be alive on any host.

        A host that does not answer is waited for until the lease of its agent is over.
        """
        session = self.connections.session
        hosts = [*(share.host for share in self.placement), *self.servers]
        for host in hosts:
            session.kill(host)
        while (clear_s := max(map(session.clear_at_s, hosts))) > (now_s := clock_s()):
            for event in self.connections.pump(min(clear_s - now_s, 1.0)):
                self._rank_events(event)
        for rank in self.all:
            rank.is_alive = False
        self.connections.printer.flush()

    def _rank_events(self, event: HostEvent) -> list[RankEvent]:
        if event.message["do"] == "lost":
            return self._on_lost(event.host, event.message["reason"])
        message, has_servers = event.message, event.host in self.servers
        if message["do"] == "look" and not has_servers:
            self._looks[event.host] = received_look(message["look"])
        if message["do"] not in ("ended", "failed"):
            return []
        found = _rank_event(message)
        if has_servers:
            return self._on_servers(event.host, found)
        if isinstance(found, RankExited):
            self.all[found.rank].is_alive = False
        return [found]

    def _on_lost(self, host: int, reason: str) -> list[RankEvent]:
        """Return the failure of the first live rank of a lost host, or of its servers."""
        errors = self.connections.drop(host)
        said = f" (ssh says: {errors})" if errors else ""
        reason = f"the host does not answer any more, {reason}{said}"
        if host in self.servers:
            return self._on_servers(host, Failure(0, f"is lost: {reason}", is_loss=True))
        lost = [rank for rank in self.alive if rank.host == host]
        for rank in lost:
            rank.is_alive = False
        if not lost:
            return []
        others = f" with {len(lost) - 1} more" if len(lost) > 1 else ""
        return [Failure(lost[0].number, f"is lost{others}: {reason}", is_loss=True)]

    def _on_servers(self, host: int, found: RankExited | Failure) -> list[RankEvent]:
        """Return the failure of a program of servers; tell the loss of a host.

        Ranks find out themselves whether replicas hold what it held: with none they are lost too.
        """
        if isinstance(found, RankExited):
            if found.code == 0:  # the ranks' store has ended, which is for its own host to tell
                return []
            found = from_exit_code(found.rank, found.code)
        if host in self._lost_servers:
            return []
        self._lost_servers.add(host)
        found = replace(
            found, process="the process of the servers", host=self.connections.name(host)
        )
        if not found.is_loss:
            return [found]
        print_note(f"{found.summary(0)}; the run goes on if replicas hold what it held")
        return []


def _rank_event(message: Message) -> RankExited | Failure:
    if message["do"] == "ended":
        return RankExited(message["rank"], message["code"])
    fields = ("rank", "headline", "text", "is_secondary", "code", "is_loss")
    time_s = time.monotonic() - message["age_s"]
    return Failure(**{name: message[name] for name in fields}, time_s=time_s)


def received_look(sent: Sequence[tuple[int, float, str]]) -> dict[int, RankProgress]:
    """Return the look of an agent, with times of this process."""
    progress: dict[int, RankProgress] = {}
    for rank, silent_s, text in sent:
        each = decode_page(zlib.decompress(base64.b64decode(text)))
        assert each is not None, "an agent leaves out pages without a word"
        word = each.word._replace(since_ns=now_ns() - int(silent_s * 1e9))
        progress[rank] = replace(each, word=word, silent_s=silent_s)
    return progress
