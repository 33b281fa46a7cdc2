"""The driver's side of the protocol, without connections, processes and clocks.

    start(e) on every host ──> running ── kill(e), or the ranks end ──> "stopped e" from each host,
                                                                        or its lease is over
                                          └── only then: start(e + 1) <──┘

The driver alone decides. A host whose agent has gone may still run ranks, until the lease of that
agent is over; `clear_at_s` says when. So no rank of one epoch meets one of the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from shoal.errors import WireError
from shoal.launch.hosts.agent_messages import Message, MessageReader, encode
from shoal.launch.hosts.lease import LeaseTimes

NUMBER = (int, float)
FIELDS: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    "beat": {"n": (int,)},
    "hello": {"facts": (dict,)},
    "answer": {"number": (int,)},
    "out": {"rank": (int,), "stream": (str,), "text": (str,)},
    "dropped": {"lines": (int,)},
    "ended": {"rank": (int,), "code": (int,)},
    "failed": {
        **{"rank": (int,), "age_s": NUMBER, "headline": (str,), "text": (str,)},
        **{"is_secondary": (bool,), "code": (int,), "is_loss": (bool,)},
    },
    "refused": {"reason": (str,)},
}
"""The fields of an agent's messages that are read without a further look, and their types."""


@dataclass(frozen=True)
class HostSpoke:
    """A message of a host that does not concern its lease; see `agent_session` for the kinds."""

    host: int
    message: Message


@dataclass(frozen=True)
class HostLost:
    """The host's agent is gone or does not answer. A new one may be connected."""

    host: int
    reason: str


DriverEvent = HostSpoke | HostLost


@dataclass
class HostState:
    """The driver's knowledge of one host.

    Attributes:
        is_connected: an agent has spoken, and its connection has not ended.
        is_ready: it has told its facts; its lease runs. No rank may start before.
        heard_s: when its last heartbeat was received.
        epoch: of the ranks that it may run; 0 for none.
    """

    is_connected: bool = False
    is_ready: bool = False
    heard_s: float = -inf
    epoch: int = 0
    reader: MessageReader = field(default_factory=MessageReader)
    outgoing: deque[bytes] = field(default_factory=deque)


class DriverSession:
    """The state of a run on several hosts.

    Args:
        hosts: the number of hosts.
        times: of the lease.

    Attributes:
        epoch: of the last start; 0 before the first.
    """

    def __init__(self, hosts: int, times: LeaseTimes) -> None:
        self.times = times
        self.epoch = 0
        self.states = [HostState() for _ in range(hosts)]

    def connected(self, host: int, now_s: float, **specification: Any) -> None:
        """Note that a new agent has sent its marker, and send it its specification.

        No rank of an earlier agent of this host may live; see `clear_at_s`.
        """
        assert self.clear_at_s(host) <= now_s, "ranks of an earlier agent may live"
        self.states[host] = HostState(is_connected=True, heard_s=now_s)
        times = {"lease_s": self.times.lease_s, "kill_s": self.times.kill_s}
        self._send(host, "spec", **times, **specification)

    def received(self, host: int, data: bytes, now_s: float) -> list[DriverEvent]:
        """Take bytes of an agent, empty at the end of its connection."""
        state = self.states[host]
        if not state.is_connected:
            return []
        if not data:
            return self.disconnected(host, "its connection has ended")
        events: list[DriverEvent] = []
        try:
            for message in state.reader.feed(data):
                events += self._on_message(host, message, now_s)
        except WireError as error:
            return [*events, *self.disconnected(host, f"it sent what no agent sends: {error}")]
        except (KeyError, TypeError, ValueError) as error:
            return [*events, *self.disconnected(host, f"it sent a malformed message: {error!r}")]
        return events

    def disconnected(self, host: int, reason: str) -> list[DriverEvent]:
        """Note that the connection has ended. Its ranks may live until `clear_at_s`."""
        state = self.states[host]
        if not state.is_connected:
            return []
        state.is_connected = False
        return [HostLost(host, reason)]

    def tick(self, now_s: float) -> list[DriverEvent]:
        """Find hosts that have been silent for too long."""
        events: list[DriverEvent] = []
        for host, state in enumerate(self.states):
            if not state.is_connected:
                continue
            silence_s = now_s - state.heard_s
            if silence_s >= self.times.lost_s:
                events += self.disconnected(host, f"no word for {silence_s:.1f} s")
        return events

    @property
    def due_s(self) -> float:
        """The time at which `tick` must be called at the latest."""
        heard_s = (state.heard_s for state in self.states if state.is_connected)
        return min(heard_s, default=inf) + self.times.lost_s

    def clear_at_s(self, host: int) -> float:
        """Return when the host surely runs no ranks: -inf now, inf while nobody can say it."""
        state = self.states[host]
        if not state.epoch:
            return -inf
        return inf if state.is_connected else state.heard_s + self.times.lost_s

    def start(self, starts: Sequence[tuple[int, dict[str, Any]]], now_s: float) -> int:
        """Start ranks on hosts as the next epoch, and return its number.

        Args:
            starts: each host with the rest of its message.
        """
        for host, state in enumerate(self.states):
            assert self.clear_at_s(host) <= now_s, "ranks of an earlier epoch may live"
            state.epoch = 0
        self.epoch += 1
        for host, values in starts:
            assert self.states[host].is_ready
            self.states[host].epoch = self.epoch
            self._send(host, "start", epoch=self.epoch, **values)
        return self.epoch

    def signal(self, host: int, rank: int, number: int, to_group: bool) -> None:
        """Send a signal to a rank of the present epoch."""
        if self._runs(host):
            values = {"rank": rank, "signal": number, "group": to_group}
            self._send(host, "signal", epoch=self.epoch, **values)

    def kill(self, host: int) -> None:
        """Kill all ranks of the present epoch on one host; "stopped" follows."""
        if self._runs(host):
            self._send(host, "kill", epoch=self.epoch)

    def ask(self, host: int, number: int, **question: Any) -> None:
        """Ask an agent about its host; its answer has the same number."""
        self._send(host, "ask", number=number, **question)

    def bye(self, host: int) -> None:
        """End an agent."""
        self._send(host, "bye")

    def to_send(self, host: int) -> bytes:
        """Return the lines for one agent, and forget them."""
        outgoing = self.states[host].outgoing
        lines = b"".join(outgoing)
        outgoing.clear()
        return lines

    def _runs(self, host: int) -> bool:
        state = self.states[host]
        return state.is_connected and state.epoch == self.epoch != 0

    def _send(self, host: int, do: str, **values: Any) -> None:
        if self.states[host].is_connected:
            self.states[host].outgoing.append(encode(do, **values))

    def _on_message(self, host: int, message: Message, now_s: float) -> list[DriverEvent]:
        state = self.states[host]
        _check_fields(message)
        if message["do"] == "beat":
            state.heard_s = now_s
            self._send(host, "ok", n=int(message["n"]))
            return []
        if message["do"] == "hello":  # the agent's lease begins with it
            state.heard_s, state.is_ready = now_s, True
        epoch = message.get("epoch")
        if epoch is not None and epoch != state.epoch:
            return []
        if message["do"] in ("stopped", "refused"):
            state.epoch = 0
        return [HostSpoke(host, message)]


def _check_fields(message: Message) -> None:
    """Raise KeyError or ValueError for a message without its fields."""
    for name, types in FIELDS.get(message["do"], {}).items():
        if type(message[name]) not in types:
            raise ValueError(f"'{message['do']}' with {name} = {message[name]!r:.80}")
