"""A driver and agents in simulated time: delays, stalls, cut connections, killed ranks and agents.

Only the sessions are real. The bodies around them are the simplest that use them as the real ones
do. Everything follows from one seed.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from shoal.launch.hosts.agent_session import (
    AgentSession,
    EndAgent,
    KillRanks,
    Specified,
    StartRanks,
)
from shoal.launch.hosts.driver_session import DriverSession, HostLost, HostSpoke
from shoal.launch.hosts.lease import LeaseTimes

TIMES = LeaseTimes()
RANKS_LOOK_S = 0.5
"""After so many seconds the ranks of a stopped agent have seen that its lease is over."""
CALM_S = 60.0
"""After the last fault a run must be running again within this time."""


@dataclass
class Link:
    """One connection: bytes arrive in order, after a delay, until it is cut."""

    is_up: bool = True
    to_driver_s: float = 0.0
    to_agent_s: float = 0.0


@dataclass
class Host:
    rate: float
    offset_s: float
    session: AgentSession | None = None
    link: Link = field(default_factory=Link)
    reachable_from_s: float = 0.0
    stalled_until_s: float = 0.0
    cut_s: float = inf
    epoch: int = 0  # of ranks that are alive
    lease_word_s: float = inf  # ranks see the lease in shared memory, also of a stopped agent
    printed: int = 0


class Simulation:
    """A run on several hosts. `run` returns the problems that it found."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.problems: list[str] = []
        self.hosts = [
            Host(1 + self.random.uniform(-0.005, 0.005), self.random.uniform(0, 1e6))
            for _ in range(self.random.randint(1, 4))
        ]
        self.driver = DriverSession(len(self.hosts), TIMES)
        self.driver_stalled_until_s = 0.0
        self.calm_from_s = inf
        self.is_stopping = False
        self.is_connecting = set(range(len(self.hosts)))
        self.stopped: set[tuple[int, int]] = set()
        self.started = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (time_s, self._number, action))

    def run(self, faults: int = 4) -> list[str]:
        last_s = 5.0
        for _ in range(faults):
            last_s += self.random.expovariate(1 / 6)
            self.at(last_s, self.random.choice([self.cut, self.kill_agent, self.end_rank]))
            if self.random.random() < 0.6:
                self.at(last_s + self.random.uniform(-3, 3), self.stall)
        self.calm_from_s = last_s
        for host in range(len(self.hosts)):
            self.connect(host)
        self.at(0.0, self.drive)
        end_s = last_s + 20 + CALM_S
        while self._events and self._events[0][0] < end_s:
            self.now_s, _, action = heapq.heappop(self._events)
            action()
            self.check()
        if any(host.epoch != self.driver.epoch for host in self.hosts) or self.is_stopping:
            self.problems.append("the run does not run again")
        return self.problems

    # The world around the sessions.

    def cut(self) -> None:
        host = self.random.choice(self.hosts)
        host.link.is_up = False
        host.cut_s = self.now_s
        host.reachable_from_s = self.now_s + self.random.uniform(0, 20)
        if self.random.random() < 0.5:  # one end may be told, by a reset
            link = host.link
            self.at(self.now_s + 0.1, lambda: self.driver_receives(host, link, b""))

    def kill_agent(self) -> None:
        host = self.random.choice(self.hosts)
        host.session, host.epoch = None, 0
        link = host.link
        self.at(self.now_s + 0.1, lambda: self.driver_receives(host, link, b""))

    def end_rank(self) -> None:
        host = self.random.choice(self.hosts)
        if host.session is not None and host.epoch:
            host.session.ended(0, -9)
            self.agent_sends(host)

    def stall(self) -> None:
        until_s = self.now_s + self.random.uniform(0, 9)
        if self.random.random() < 0.5:
            self.driver_stalled_until_s = until_s
        else:
            self.random.choice(self.hosts).stalled_until_s = until_s

    def connect(self, number: int) -> None:
        host = self.hosts[number]
        host.session, host.link, host.cut_s, host.lease_word_s = None, Link(), inf, inf
        session = AgentSession(self.clock(host))

        def connected() -> None:
            if self.now_s < self.driver_stalled_until_s:
                self.at(self.driver_stalled_until_s, connected)
                return
            self.is_connecting.discard(number)
            self.driver.connected(number, self.now_s)

        host.session = session
        self.at(self.now_s + self.random.uniform(0.1, 2), connected)
        self.agent_wakes(host, session)

    def clock(self, host: Host) -> float:
        return self.now_s * host.rate + host.offset_s

    # An agent.

    def agent_wakes(self, host: Host, session: AgentSession) -> None:
        if host.session is not session:
            return
        if self.now_s < host.stalled_until_s:
            self.at(host.stalled_until_s, lambda: self.agent_wakes(host, session))
            return
        self.obey(host, session.tick(self.clock(host)))
        if host.epoch:
            host.printed += 1
            session.output(0, "stdout", f"{host.printed}\n")
        self.agent_sends(host)
        due_s = (session.due_s - self.clock(host)) / host.rate
        delay_s = min(max(due_s, 0.001), 0.5)
        self.at(self.now_s + delay_s, lambda: self.agent_wakes(host, session))

    def agent_receives(self, host: Host, session: AgentSession, data: bytes) -> None:
        if host.session is not session:
            return
        if self.now_s < host.stalled_until_s:
            self.at(host.stalled_until_s, lambda: self.agent_receives(host, session, data))
            return
        self.obey(host, session.tick(self.clock(host)))
        self.obey(host, session.received(data, self.clock(host)))
        self.agent_sends(host)

    def obey(self, host: Host, orders: list) -> None:
        self.write_lease(host)
        session = host.session
        for order in orders:
            match order:
                case Specified():
                    session.hello({}, self.clock(host))
                    self.write_lease(host)
                case StartRanks(message):
                    if host.epoch:
                        self.problems.append("an agent ran two epochs")
                    host.epoch = message["epoch"]
                case KillRanks():
                    self.at(self.now_s + self.kill_s(), lambda: self.ranks_killed(host, session))
                case EndAgent():
                    self.at(self.now_s + self.kill_s(), lambda: self.agent_ended(host, session))

    def write_lease(self, host: Host) -> None:
        if host.session is not None and host.session.lease_until_s < inf:
            host.lease_word_s = host.session.lease_until_s

    def kill_s(self) -> float:
        return self.random.uniform(0, 0.95 * TIMES.kill_s)

    def ranks_killed(self, host: Host, session: AgentSession) -> None:
        if host.session is session and session.is_running:
            host.epoch = 0
            session.stopped()
            self.agent_sends(host)

    def agent_ended(self, host: Host, session: AgentSession) -> None:
        if host.session is session:
            host.session, host.epoch = None, 0
            link = host.link
            self.at(self.now_s + 0.05, lambda: self.driver_receives(host, link, b""))

    def agent_sends(self, host: Host) -> None:
        session, link = host.session, host.link
        while session is not None and (data := session.to_send()):
            link.to_driver_s = max(link.to_driver_s, self.now_s + self.delay_s())
            self.at(
                link.to_driver_s,
                lambda data=data: link.is_up and self.driver_receives(host, link, data),
            )

    # The driver.

    def driver_receives(self, host: Host, link: Link, data: bytes) -> None:
        if host.link is not link:
            return
        if self.now_s < self.driver_stalled_until_s:
            self.at(self.driver_stalled_until_s, lambda: self.driver_receives(host, link, data))
            return
        number = self.hosts.index(host)
        self.on_events(self.driver.received(number, data, self.now_s))
        self.driver_sends()

    def on_events(self, events: list) -> None:
        for event in events:
            match event:
                case HostLost():
                    self.stop()
                case HostSpoke(host, {"do": "ended"}):
                    self.stop()
                case HostSpoke(host, {"do": "stopped", "epoch": epoch}):
                    self.stopped.add((host, epoch))
                case HostSpoke(_, {"do": "refused"}):
                    self.problems.append("a start was refused")
                    self.stop()
                case HostSpoke(host, {"do": "out", "epoch": epoch, "text": text}):
                    if (host, epoch) in self.stopped:
                        self.problems.append("output of an epoch that has stopped")
                    self.driver.more_output(host, len(text))

    def stop(self) -> None:
        if not self.is_stopping:
            self.is_stopping = True
            for host in range(len(self.hosts)):
                self.driver.kill(host)

    def drive(self) -> None:
        if self.now_s >= self.driver_stalled_until_s:
            self.on_events(self.driver.tick(self.now_s))
            hosts = range(len(self.hosts))
            clear = all(self.driver.clear_at_s(host) <= self.now_s for host in hosts)
            for host in hosts:
                state = self.driver.states[host]
                is_reachable = self.now_s >= self.hosts[host].reachable_from_s
                is_wanted = not state.is_connected and host not in self.is_connecting
                if clear and is_wanted and is_reachable:
                    self.is_connecting.add(host)
                    self.connect(host)
            is_whole = all(state.is_connected and state.is_ready for state in self.driver.states)
            if clear and is_whole and (self.is_stopping or not self.driver.epoch):
                self.driver.start([(host, {}) for host in hosts], self.now_s)
                self.is_stopping = False
                self.started += 1
        self.driver_sends()
        self.at(self.now_s + 0.2, self.drive)

    def driver_sends(self) -> None:
        for number, host in enumerate(self.hosts):
            session, link = host.session, host.link
            if not (data := self.driver.to_send(number)) or session is None:
                continue
            link.to_agent_s = max(link.to_agent_s, self.now_s + self.delay_s())
            self.at(
                link.to_agent_s,
                lambda host=host, session=session, link=link, data=data: (
                    link.is_up and self.agent_receives(host, session, data)
                ),
            )

    def delay_s(self) -> float:
        has_spike = self.now_s < self.calm_from_s and self.random.random() < 0.01
        spike_s = self.random.uniform(0, 9) if has_spike else 0.0
        return spike_s + self.random.expovariate(1 / 0.05)

    # The invariants.

    def check(self) -> None:
        for host in self.hosts:
            if self.clock(host) > host.lease_word_s + RANKS_LOOK_S:
                host.epoch = 0
        epochs = {host.epoch for host in self.hosts if host.epoch}
        if len(epochs) > 1:
            self.problems.append(f"ranks of epochs {epochs} are alive at {self.now_s:.2f}")
        for host in self.hosts:
            stall_s = max(0.0, host.stalled_until_s - host.cut_s)
            bound_s = (TIMES.lost_s + stall_s) * 1.01 + 0.5
            if host.epoch and self.now_s > host.cut_s + bound_s:
                self.problems.append("ranks outlive the lease")
