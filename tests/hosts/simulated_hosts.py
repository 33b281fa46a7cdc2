"""A driver and agents in simulated time: messages that come late, processes that stop or die.

Only the sessions are real: a simulated agent reads, then looks at its clock. One seed decides all.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from simulated_faults import LAST_WORDS, meet_fault

from shoal.launch.hosts.agent_session import KILL_S, LEASE_S, AgentSession, Order
from shoal.launch.hosts.driver_session import DriverSession, HostEvent

TIMER_S = 0.5
"""So long after the end of a lease the kernel has killed the agent and its ranks."""
RATE = 0.005
"""Clocks run faster or slower by so much at most."""
CALM_S = 50.0
"""So long after the last fault a run must have been running again for STABLE_S."""
STABLE_S = 15.0


@dataclass
class Direction:
    """One direction of a connection. Bytes arrive in order."""

    held_until_s: float = 0.0
    slow_until_s: float = 0.0
    last_arrival_s: float = 0.0


@dataclass(eq=False)
class Agent:
    """One agent with its connection and its ranks."""

    host: int
    session: AgentSession
    to_driver: Direction = field(default_factory=Direction)
    to_agent: Direction = field(default_factory=Direction)
    inbox: list[bytes] = field(default_factory=list)
    stopped_until_s: float = 0.0
    is_alive: bool = True
    epoch: int = 0  # the number of the start of ranks that are alive
    timer_s: float = inf
    contact_s: float = inf  # when it last read anything
    closed_s: float = inf  # when it was told that its connection has ended
    printed: int = 0
    is_cut: bool = False
    has_last_words: bool = False


class Simulation:
    """A run on several hosts. `run` returns the problems that it found."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.problems: list[str] = []
        hosts = self.random.randint(1, 4)
        self.clocks = [
            (1 + self.random.uniform(-RATE, RATE), self.random.uniform(0, 1e6))
            for _ in range(hosts)
        ]
        self.agents: list[Agent] = []  # all that ever were
        self.current: list[Agent | None] = [None] * hosts  # whose connections the driver has
        self.reachable_from_s = [0.0] * hosts
        self.is_connecting = [False] * hosts
        self.driver = DriverSession(hosts, LEASE_S)
        self.driver_stopped_until_s = 0.0
        self.driver_lag_s = 0.0
        self.driver_inbox: list[tuple[Agent, bytes]] = []
        self.is_stopping = False
        self.starts_s: list[float] = []
        self.output_s = 0.0
        self.stopped: set[tuple[int, int]] = set()
        self.epoch = 0
        self.calm_from_s = inf
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (time_s, self._number, action))

    def run(self, faults: int = 7) -> list[str]:
        last_s = 5.0
        for _ in range(faults):
            last_s += self.random.choice([self.random.uniform(0, 3), self.random.uniform(5, 20)])
            self.at(last_s, lambda: meet_fault(self))
        self.calm_from_s = last_s
        self.at(0.0, self.driver_looks)
        end_s = last_s + CALM_S
        while self._events and self._events[0][0] < end_s and len(self.problems) < 3:
            self.now_s, _, action = heapq.heappop(self._events)
            try:
                action()
            except AssertionError as error:
                self.problems.append(f"a session says: {error}")
            self.check()
        if self.is_stopping or not self.starts_s or self.starts_s[-1] > end_s - STABLE_S:
            self.problems.append("the run does not run again")
        elif any(agent is None or agent.epoch != self.epoch for agent in self.current):
            self.problems.append("ranks have ended, and nobody says so")
        elif self.output_s < end_s - STABLE_S:
            self.problems.append("output of ranks does not arrive")
        return self.problems

    def an_agent(self) -> Agent | None:
        found = [agent for agent in self.agents if agent.is_alive]
        return self.random.choice(found) if found else None

    # Connections.

    def send(self, direction: Direction, arrive: Callable[[], None]) -> None:
        is_calm = self.now_s >= self.calm_from_s
        delay_s = self.random.expovariate(1 / 0.05)
        if self.now_s < direction.slow_until_s and not is_calm:
            delay_s += self.random.uniform(0, 8)
        arrival_s = max(direction.last_arrival_s, self.now_s + delay_s, direction.held_until_s)
        if arrival_s < inf:
            direction.last_arrival_s = arrival_s
            self.at(arrival_s, arrive)

    def arrives_at_driver(self, agent: Agent, data: bytes) -> None:
        self.driver_inbox.append((agent, data))
        self.driver_reads()

    def arrives_at_agent(self, agent: Agent, data: bytes) -> None:
        agent.inbox.append(data)
        self.agent_turns(agent)

    # Agents.

    def connect(self, host: int) -> None:
        agent = Agent(host, AgentSession(self.clock(host)))
        self.agents.append(agent)
        self.is_connecting[host] = True

        def connected() -> None:
            if self.now_s < self.driver_stopped_until_s:
                self.at(self.driver_stopped_until_s, connected)
                return
            self.is_connecting[host] = False
            self.current[host] = agent
            self.driver.connected(host, self.driver_clock())
            self.driver_sends()

        self.at(self.now_s + self.random.uniform(0.1, 2), connected)
        self.agent_wakes(agent)

    def clock(self, host: int) -> float:
        rate, offset_s = self.clocks[host]
        return self.now_s * rate + offset_s

    def agent_wakes(self, agent: Agent) -> None:
        """Take a turn, and the next one when the session wants it."""
        if agent.is_alive:
            if agent.epoch and self.now_s >= agent.stopped_until_s:
                agent.printed += 1
                agent.session.output(0, "stdout", f"{agent.epoch} {agent.printed}\n")
            self.agent_turns(agent)
            due_s = (agent.session.due_s - self.clock(agent.host)) / self.clocks[agent.host][0]
            self.at(self.now_s + min(max(due_s, 0.001), 0.5), lambda: self.agent_wakes(agent))

    def agent_turns(self, agent: Agent) -> None:
        if not agent.is_alive:
            return
        if self.now_s < agent.stopped_until_s:
            self.at(agent.stopped_until_s, lambda: self.agent_turns(agent))
            return
        inbox, agent.inbox = agent.inbox, []
        for data in inbox:
            if data:
                agent.contact_s = self.now_s
            else:
                agent.closed_s = min(agent.closed_s, self.now_s)
            self.obey(agent, agent.session.received(data, self.clock(agent.host)))
        self.obey(agent, agent.session.tick(self.clock(agent.host)))
        self.set_timer(agent)
        self.agent_sends(agent)

    def obey(self, agent: Agent, orders: list[Order]) -> None:
        for order in orders:
            match order:
                case {"do": "spec"}:
                    agent.session.hello({}, self.clock(agent.host))
                    self.set_timer(agent)
                case {"do": "start", "epoch": epoch}:
                    if agent.epoch:
                        self.problems.append("an agent runs two epochs")
                    agent.epoch = epoch
                    agent.has_last_words = False
                case {"do": "kill"}:
                    self.kill_ranks(agent)
                case {"do": "end"}:
                    self.at(self.now_s + self.kill_s(), lambda: self.agent_ends(agent))

    def set_timer(self, agent: Agent) -> None:
        if agent.session.lease_until_s < inf:
            agent.timer_s = agent.session.lease_until_s

    def kill_s(self) -> float:
        return self.random.uniform(0, 0.95 * KILL_S)

    def kill_ranks(self, agent: Agent) -> None:
        def killed() -> None:
            if self.now_s < agent.stopped_until_s:
                self.at(agent.stopped_until_s, killed)
            elif agent.is_alive:
                agent.epoch = 0
                agent.session.stopped()
                self.agent_sends(agent)

        self.at(self.now_s + self.kill_s(), killed)

    def agent_ends(self, agent: Agent) -> None:
        """End an agent; the kernel then ends its ranks, and its connection."""
        if agent.is_alive:
            agent.is_alive, agent.epoch = False, 0
            self.send(agent.to_driver, lambda: self.arrives_at_driver(agent, b""))

    def agent_sends(self, agent: Agent) -> None:
        while data := agent.session.to_send():
            self.send(agent.to_driver, lambda data=data: self.arrives_at_driver(agent, data))

    # The driver.

    def driver_clock(self) -> float:
        return self.now_s - self.driver_lag_s

    def driver_looks(self) -> None:
        """Take a turn, and the next one soon."""
        self.driver_reads()
        if self.now_s >= self.driver_stopped_until_s:
            self.on_events(self.driver.tick(self.driver_clock()))
            self.decide()
            self.driver_sends()
        self.at(self.now_s + 0.2, self.driver_looks)

    def driver_reads(self) -> None:
        if self.now_s < self.driver_stopped_until_s:
            return
        inbox, self.driver_inbox = self.driver_inbox, []
        for agent, data in inbox:
            if self.is_current(agent):
                self.on_events(self.driver.received(agent.host, data, self.driver_clock()))
        self.driver_sends()

    def is_current(self, agent: Agent) -> bool:
        """Return True if the driver still has this agent's connection."""
        return self.current[agent.host] is agent

    def on_events(self, events: list[HostEvent]) -> None:
        for event in events:
            match event:
                case HostEvent(host, {"do": "lost", "reason": reason}):
                    agent = self.current[host]
                    is_well = agent is not None and agent.is_alive and not agent.is_cut
                    if is_well and "no word for" not in reason:
                        self.problems.append(f"a connection is given up: {reason}")
                    self.close(host)
                    self.stop()
                case HostEvent(host, {"do": "ended", "code": code}):
                    agent = self.current[host]
                    is_told = agent is None or agent.has_last_words or self.is_stopping
                    if code == 0 and not is_told:
                        self.problems.append("the last output of ranks is lost")
                    self.stop()
                case HostEvent(host, {"do": "stopped"}):
                    self.stopped.add((host, self.epoch))
                case HostEvent(host, {"do": "out", "text": text}):
                    epoch = text.split()[0]
                    if epoch.isdecimal() and (host, int(epoch)) in self.stopped:
                        self.problems.append("output of an epoch that has stopped")
                    self.output_s = self.now_s
                    agent = self.current[host]
                    if agent is not None and text == LAST_WORDS:
                        agent.has_last_words = True

    def close(self, host: int) -> None:
        """Close the connection to an agent that is lost."""
        agent, self.current[host] = self.current[host], None
        if agent is not None:
            self.send(agent.to_agent, lambda: self.arrives_at_agent(agent, b""))

    def stop(self) -> None:
        if not self.is_stopping:
            self.is_stopping = True
            for host in range(len(self.current)):
                self.driver.kill(host)

    def decide(self) -> None:
        """Connect to hosts that are lost, and start once none can have ranks."""
        hosts = range(len(self.current))
        if any(self.driver.clear_at_s(host) > self.driver_clock() for host in hosts):
            return
        for host in hosts:
            is_lost = self.current[host] is None and not self.is_connecting[host]
            if is_lost and self.now_s >= self.reachable_from_s[host]:
                self.connect(host)
        states = self.driver.states
        is_whole = all(state.is_connected and state.is_ready for state in states)
        if is_whole and (self.is_stopping or not self.epoch):
            self.epoch += 1
            message = {"epoch": self.epoch}
            self.driver.start(dict.fromkeys(hosts, message), self.driver_clock())
            self.is_stopping = False
            self.starts_s.append(self.now_s)

    def driver_sends(self) -> None:
        for host, agent in enumerate(self.current):
            if agent is not None and (data := self.driver.to_send(host)):
                self.send(
                    agent.to_agent,
                    lambda agent=agent, data=data: self.arrives_at_agent(agent, data),
                )

    # The invariants.

    def check(self) -> None:
        epochs = set()
        for agent in self.agents:
            if not agent.epoch:
                continue
            if self.clock(agent.host) > agent.timer_s + TIMER_S:
                self.agent_ends(agent)
                continue
            epochs.add(agent.epoch)
            if self.now_s > agent.contact_s + self.driver.lost_s * (1 + RATE):
                self.problems.append("ranks outlive the lease")
            if agent.stopped_until_s < agent.closed_s < self.now_s - KILL_S:
                self.problems.append("ranks outlive the connection")
        if len(epochs) > 1:
            self.problems.append(f"ranks of epochs {epochs} are alive at {self.now_s:.2f}")
