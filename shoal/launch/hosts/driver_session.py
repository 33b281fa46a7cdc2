"""The driver's side of the protocol, without connections, processes and clocks.

    "start" on every host ──> running ── "kill" ──> "stopped" from each host, or its lease is over
                                 ^──────────────────────────────────────────────────────┘

The driver alone decides. A host whose agent has gone may still run ranks, until the lease of that
agent is over; `clear_at_s` says when. So no rank of one start meets one of the next. Messages need
no number of their start: a connection keeps their order, and a host starts after its "stopped".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

from shoal.launch.hosts.agent_session import KILL_S, Message, MessageReader, encode


class HostEvent(NamedTuple):
    """A message of a host that does not concern its lease; see `agent_session` for the kinds.

    The message `{"do": "lost", "reason": ...}` is of the driver itself: the host's agent is gone or
    does not answer. A new one may be connected.
    """

    host: int
    message: Message


@dataclass
class HostState:
    """The driver's knowledge of one host.

    Attributes:
        is_connected: an agent has spoken, and its connection has not ended.
        is_ready: it has told its facts; its lease runs. No rank may start before.
        heard_s: when its last heartbeat was received.
        may_run: ranks were started there, and may be alive.
    """

    is_connected: bool = False
    is_ready: bool = False
    heard_s: float = -inf
    may_run: bool = False
    reader: MessageReader = field(default_factory=MessageReader)
    outgoing: deque[bytes] = field(default_factory=deque)


class DriverSession:
    """The state of a run on several hosts.

    Args:
        hosts: the number of hosts.
        lease_s: of the agents.

    Attributes:
        lost_s: seconds without a heartbeat after which no rank of the host is alive.
    """

    def __init__(self, hosts: int, lease_s: float) -> None:
        self.lease_s, self.lost_s = lease_s, lease_s + KILL_S
        self.states = [HostState() for _ in range(hosts)]

    def connected(self, host: int, now_s: float, **specification: Any) -> None:
        """Note that a new agent has sent its marker, and send it its specification.

        No rank of an earlier agent of this host may live; see `clear_at_s`.
        """
        assert self.clear_at_s(host) <= now_s, "ranks of an earlier agent may live"
        self.states[host] = HostState(is_connected=True, heard_s=now_s)
        self.send(host, "spec", lease_s=self.lease_s, **specification)

    def received(self, host: int, data: bytes, now_s: float) -> list[HostEvent]:
        """Take bytes of an agent, empty at the end of its connection."""
        state = self.states[host]
        if not state.is_connected:
            return []
        if not data:
            return self.disconnected(host, "its connection has ended")
        events: list[HostEvent] = []
        for message in state.reader.feed(data):
            events += self._on_message(host, message, now_s)
        return events

    def disconnected(self, host: int, reason: str) -> list[HostEvent]:
        """Note that the connection has ended. Its ranks may live until `clear_at_s`."""
        state = self.states[host]
        if not state.is_connected:
            return []
        state.is_connected = False
        return [HostEvent(host, {"do": "lost", "reason": reason})]

    def tick(self, now_s: float) -> list[HostEvent]:
        """Find hosts that have been silent for too long."""
        events: list[HostEvent] = []
        for host, state in enumerate(self.states):
            silence_s = now_s - state.heard_s
            if state.is_connected and silence_s >= self.lost_s:
                events += self.disconnected(host, f"no word for {silence_s:.1f} s")
        return events

    @property
    def due_s(self) -> float:
        """The time at which `tick` must be called at the latest."""
        heard_s = (state.heard_s for state in self.states if state.is_connected)
        return min(heard_s, default=inf) + self.lost_s

    def clear_at_s(self, host: int) -> float:
        """Return when the host surely runs no ranks: -inf now, inf while nobody can say it."""
        state = self.states[host]
        if not state.may_run:
            return -inf
        return inf if state.is_connected else state.heard_s + self.lost_s

    def start(self, starts: Mapping[int, Mapping[str, Any]], now_s: float) -> None:
        """Start ranks on hosts. Args: starts: the rest of the message of each host."""
        for host, state in enumerate(self.states):
            assert self.clear_at_s(host) <= now_s, "ranks of an earlier start may live"
            state.may_run = False
        for host, values in starts.items():
            assert self.states[host].is_ready
            self.states[host].may_run = True
            self.send(host, "start", **values)

    def kill(self, host: int) -> None:
        """Kill all ranks of one host; "stopped" follows."""
        if self.states[host].may_run:
            self.send(host, "kill")

    def send(self, host: int, do: str, **values: Any) -> None:
        """Send a message to an agent, if it is connected: `signal` for a rank, `ask` a question."""
        if self.states[host].is_connected:
            self.states[host].outgoing.append(encode(do, **values))

    def to_send(self, host: int) -> bytes:
        """Return the lines for one agent, and forget them."""
        outgoing = self.states[host].outgoing
        lines = b"".join(outgoing)
        outgoing.clear()
        return lines

    def _on_message(self, host: int, message: Message, now_s: float) -> list[HostEvent]:
        state = self.states[host]
        match message["do"]:
            case "beat":
                state.heard_s = now_s
                self.send(host, "ok", at=message["at"])
                return []
            case "hello":  # the agent's lease begins with it
                state.heard_s, state.is_ready = now_s, True
            case "stopped":
                state.may_run = False
        return [HostEvent(host, message)]
