"""Messages between a driver and an agent, and the times that follow from one lease.

A message is one JSON object a line, with the kind under "do". Text of ranks need not be Unicode, so
what cannot be encoded is written out. Both sides run the same source of Shoal, as one user: neither
checks what the other has made.

    agent   heartbeat sent at a ───────────────────> driver   received at d, answers "ok a"
            "ok a": the lease runs until a + L                none after it: the host counts as
            past it: end everything, K s at most              stopped at d + L + K

The agent counts from its own sending. As a lies before d, the agent has ended its ranks before the
driver starts new ones, however the two clocks are set; only their rates matter, and K has room for
these.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any

Message = Mapping[str, Any]

PROTOCOL = 8
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
