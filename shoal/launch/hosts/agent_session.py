"""The protocol of driver and agent, and the agent's side of it, without connections and processes.

A message is one JSON object a line, with the kind under "do". Text of ranks need not be Unicode, so
what cannot be encoded is written out. Both sides run the same source of Shoal, as one user: neither
checks what the other has made.

    agent   heartbeat sent at a ───────────────────> driver   received at d, answers "ok a"
            "ok a": the lease runs until a + L                none after it: the host counts as
            past it: end everything, K s at most              stopped at d + L + K

The agent counts from its own sending. As a lies before d, the agent has ended its ranks before the
driver starts new ones, however the two clocks are set; only their rates matter, and K has room for
these. The agent's side:

    wait for "spec" ──> "hello" ──> idle ── "start" ──> running ── "kill" ──> idle
                                      ^───────────────────────────────┘ "stopped"

An agent does what the driver says, and decides one thing alone: when its lease or its connection
ends, it ends everything that it has started.

What it sends has two queues: heartbeats overtake the output of ranks, which a slow connection holds
back.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Mapping
from math import inf
from typing import Any

Message = Mapping[str, Any]

PROTOCOL = 9
"""Version of the messages; it must be equal on both sides."""
MARKER = "SHOAL-AGENT"
"""The agent's first line is this word, PROTOCOL, and a random number."""
MAX_TEXT = 8_000
"""The most characters of output or of a traceback in one message."""
LEASE_VARIABLE = "SHOAL_HOSTS_LEASE"
LEASE_S = 6.0
"""L. Its heartbeats come four times as often, so three in a row may be lost."""
KILL_S = 2.0
"""K, the time in which an agent ends all that it has started."""


def encode(do: str, **values: Any) -> bytes:
    """Return one line."""
    text = json.dumps({"do": do, **values}, ensure_ascii=False, separators=(",", ":"))
    return text.encode(errors="backslashreplace") + b"\n"


class MessageReader:
    """Collects bytes into messages."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that are complete with `data`."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines if line]


def shortened(text: str) -> str:
    """Return `text` with its middle left out where it is too long for one message."""
    if len(text) <= MAX_TEXT:
        return text
    head = MAX_TEXT // 4
    return f"{text[:head]}\n... (shortened) ...\n{text[-(MAX_TEXT - head - 30) :]}"


def clock_s() -> float:
    """Return seconds since the system's start, sleep included: a lease ends while a host sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def lease_s() -> float:
    """Return L of this run; tests shorten it by a variable."""
    return float(os.environ.get(LEASE_VARIABLE, LEASE_S))


SPECIFICATION_S = 30.0  # from the marker to the driver's first message
MOST_PENDING_OUTPUT = 4 << 20  # characters; ranks never wait for the connection


Order = Message
"""A message of the driver that the agent's process must act on, or `end` of the session itself.

- `spec`: prepare this process, then call `AgentSession.hello`;
- `ask`: find the answer to a question, then tell it as `answer` with its number;
- `start`: start ranks; no earlier one is alive;
- `signal`: send a signal to one rank;
- `kill`: kill all ranks, then call `AgentSession.stopped`;
- `end`: end everything that was started, and the agent. Nothing follows.
"""


class AgentSession:
    """The state of one agent.

    Args:
        now_s: the time at which the marker was sent.

    Attributes:
        is_running: ranks may be alive.
        lease_until_s: the end of the lease.
    """

    def __init__(self, now_s: float) -> None:
        self._lease_s = LEASE_S
        self.is_running = False
        self.lease_until_s = now_s + SPECIFICATION_S
        self._is_over = False
        self._is_specified = False
        self._reader = MessageReader()
        self._urgent: deque[bytes] = deque()
        self._ordered: deque[tuple[int, bytes]] = deque()  # characters of output, and the line
        self._pending_output = 0
        self._dropped = 0
        self._next_beat_s = inf

    @property
    def due_s(self) -> float:
        """The time at which `tick` must be called at the latest."""
        return min(self.lease_until_s, self._next_beat_s)

    def received(self, data: bytes, now_s: float) -> list[Order]:
        """Take bytes from the driver, empty at the end of the connection."""
        if self._is_over:
            return []
        if not data:
            return self._end("the connection to the driver has ended")
        orders: list[Order] = []
        for message in self._reader.feed(data):
            orders += [] if self._is_over else self._on_message(message)
        return orders

    def tick(self, now_s: float) -> list[Order]:
        """Send a heartbeat if it is time, or find that the lease is over."""
        if self._is_over:
            return []
        if now_s >= self.lease_until_s:
            reason = "the driver was silent for too long"
            return self._end(reason if self._is_specified else "no specification has come")
        if now_s >= self._next_beat_s:
            self._next_beat_s = now_s + self._lease_s / 4
            self._urgent.append(encode("beat", at=now_s))
        return []

    def hello(self, facts: Message, now_s: float) -> None:
        """Answer the specification. The lease begins here."""
        self.lease_until_s = now_s + self._lease_s
        self._next_beat_s = now_s
        self.tell("hello", facts=facts)

    def tell(self, do: str, **values: Any) -> None:
        """Send a message before the output that waits."""
        self._urgent.append(encode(do, **values))

    def ended(self, rank: int, code: int) -> None:
        """Report the end of a rank, behind its output."""
        self._note_dropped()
        self._ordered.append((0, encode("ended", rank=rank, code=code)))

    def stopped(self) -> None:
        """Report that no rank is alive."""
        self.is_running = False
        self._ordered.append((0, encode("stopped")))

    def output(self, rank: int, stream: str, text: str) -> None:
        """Send what a rank has printed, or drop it where too much waits."""
        if self._pending_output + len(text) > MOST_PENDING_OUTPUT:
            self._dropped += text.count("\n") or 1
            return
        self._note_dropped()
        for begin in range(0, len(text), MAX_TEXT):
            part = text[begin : begin + MAX_TEXT]
            self._ordered.append((len(part), encode("out", rank=rank, stream=stream, text=part)))
            self._pending_output += len(part)

    def to_send(self) -> bytes:
        """Return the next lines, urgent ones first; empty where nothing is left."""
        if self._urgent:
            lines = b"".join(self._urgent)
            self._urgent.clear()
            return lines
        if not self._ordered:
            return b""
        length, line = self._ordered.popleft()
        self._pending_output -= length
        return line

    def _on_message(self, message: Message) -> list[Order]:
        match message["do"]:
            case "ok":
                until_s = float(message["at"]) + self._lease_s
                self.lease_until_s = max(self.lease_until_s, until_s)
                return []
            case "spec" if not self._is_specified:
                self._is_specified = True
                self._lease_s = float(message["lease_s"])
            case "start" if self._is_specified and not self.is_running:
                self.is_running = True
            case "kill":
                # The driver has ended the ranks and wants their end soon, not their output.
                self._ordered = deque(entry for entry in self._ordered if entry[0] == 0)
                self._pending_output = self._dropped = 0
            case "ask" | "signal":
                pass
            case unknown:
                return self._end(f"the driver sent '{unknown}', which no driver sends here")
        return [message]

    def _note_dropped(self) -> None:
        if self._dropped:
            self._ordered.append((0, encode("dropped", lines=self._dropped)))
            self._dropped = 0

    def _end(self, reason: str) -> list[Order]:
        self._is_over = True
        self.lease_until_s = self._next_beat_s = inf
        return [{"do": "end", "reason": reason}]
