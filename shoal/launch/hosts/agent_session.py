"""The agent's side of the protocol, without connections, processes and clocks.

    wait for "spec" ──> "hello" ──> idle ── "start e" ──> running e ── the last rank ended ──> idle
                                      ^──────────────────────────────────────┘ "stopped e"

An agent runs one epoch at a time. It does what the driver says, and decides one thing alone: when
its lease or its connection ends, it ends everything that it has started.

What it sends has two queues: heartbeats overtake the output of ranks, which a slow connection holds
back.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf
from typing import Any

from shoal.errors import WireError
from shoal.launch.hosts.agent_messages import MAX_TEXT, Message, MessageReader, encode
from shoal.launch.hosts.lease import LeaseTimes

SPECIFICATION_S = 30.0  # from the marker to the driver's first message
MOST_PENDING_OUTPUT = 4 << 20  # characters; ranks never wait for the connection


@dataclass(frozen=True)
class Specified:
    """The driver's specification has come; answer with `AgentSession.hello`."""

    message: Message


@dataclass(frozen=True)
class Asked:
    """A question about this host, to be answered with `AgentSession.answer`."""

    message: Message


@dataclass(frozen=True)
class StartRanks:
    """Start the ranks of a new epoch; no rank of an earlier one is alive."""

    message: Message


@dataclass(frozen=True)
class SignalRank:
    """Send a signal to one rank of the present epoch, or to its process group."""

    rank: int
    number: int
    to_group: bool


@dataclass(frozen=True)
class KillRanks:
    """Kill all ranks of the present epoch, then call `AgentSession.stopped`."""


@dataclass(frozen=True)
class EndAgent:
    """End everything that was started, and the agent. Nothing follows."""

    reason: str


Order = Specified | Asked | StartRanks | SignalRank | KillRanks | EndAgent


class AgentSession:
    """The state of one agent.

    Args:
        now_s: the time at which the marker was sent.

    Attributes:
        epoch: of the ranks that run or ran last; 0 before the first start.
        is_running: ranks of `epoch` may be alive.
        lease_until_s: the end of the lease.
    """

    def __init__(self, now_s: float) -> None:
        self.times = LeaseTimes()
        self.epoch = 0
        self.is_running = False
        self.lease_until_s = now_s + SPECIFICATION_S
        self._is_over = False
        self._is_specified = False
        self._reader = MessageReader()
        self._urgent: deque[bytes] = deque()
        self._ordered: deque[tuple[int, bytes]] = deque()  # characters of output, and the line
        self._pending_output = 0
        self._dropped = 0
        self._beats: dict[int, float] = {}  # sent and not answered, with their times
        self._next_beat_s = inf
        self._beat = 0

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
        try:
            for message in self._reader.feed(data):
                if not self._is_over:
                    orders += self._on_message(message, now_s)
        except (WireError, KeyError, TypeError, ValueError) as error:
            return [*orders, *self._end(f"the driver sent what no driver sends: {error!r}")]
        return orders

    def tick(self, now_s: float) -> list[Order]:
        """Send a heartbeat if it is time, or find that the lease is over."""
        if self._is_over:
            return []
        if now_s >= self.lease_until_s:
            reason = "the driver was silent for too long"
            return self._end(reason if self._is_specified else "no specification has come")
        if now_s >= self._next_beat_s:
            self._beat += 1
            self._beats[self._beat] = now_s
            self._next_beat_s = now_s + self.times.heartbeat_s
            self._urgent.append(encode("beat", n=self._beat))
        return []

    def hello(self, facts: Message, now_s: float) -> None:
        """Answer the specification. The lease begins here."""
        self.lease_until_s = now_s + self.times.lease_s
        self._next_beat_s = now_s
        self._urgent.append(encode("hello", facts=facts))

    def answer(self, number: int, **values: Any) -> None:
        """Answer the question `number`."""
        self._urgent.append(encode("answer", number=number, **values))

    def tell(self, do: str, **values: Any) -> None:
        """Send an event of the present epoch before the output that waits."""
        self._urgent.append(encode(do, epoch=self.epoch, **values))

    def ended(self, rank: int, code: int) -> None:
        """Report the end of a rank, behind its output."""
        self._ordered.append((0, encode("ended", epoch=self.epoch, rank=rank, code=code)))

    def stopped(self) -> None:
        """Report that no rank of the epoch is alive, behind all of their output."""
        self.is_running = False
        self._note_dropped()
        self._ordered.append((0, encode("stopped", epoch=self.epoch)))

    def output(self, rank: int, stream: str, text: str) -> None:
        """Send what a rank has printed, or drop it where too much waits."""
        if self._pending_output + len(text) > MOST_PENDING_OUTPUT:
            self._dropped += text.count("\n") or 1
            return
        self._note_dropped()
        for begin in range(0, len(text), MAX_TEXT):
            part = text[begin : begin + MAX_TEXT]
            line = encode("out", epoch=self.epoch, rank=rank, stream=stream, text=part)
            self._ordered.append((len(part), line))
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

    def _on_message(self, message: Message, now_s: float) -> list[Order]:
        match message["do"]:
            case "spec" if not self._is_specified:
                self._is_specified = True
                self.times = LeaseTimes(float(message["lease_s"]), float(message["kill_s"]))
                return [Specified(message)]
            case "ok":
                self._on_ok(int(message["n"]))
            case "ask":
                return [Asked(message)]
            case "bye":
                return self._end("the driver has ended the run")
            case "start":
                return self._on_start(message)
            case "signal" if self._is_present(message):
                number, to_group = int(message["signal"]), bool(message["group"])
                return [SignalRank(int(message["rank"]), number, to_group)]
            case "kill" if self._is_present(message):
                self._drop_output()
                return [KillRanks()]
            case "signal" | "kill":  # of another epoch
                pass
            case unknown:
                return self._end(f"the driver sent '{unknown}', which this agent does not know")
        return []

    def _on_ok(self, beat: int) -> None:
        sent_s = self._beats.pop(beat, None)
        if sent_s is not None:
            self.lease_until_s = max(self.lease_until_s, sent_s + self.times.lease_s)
            self._beats = {number: at for number, at in self._beats.items() if number > beat}

    def _on_start(self, message: Message) -> list[Order]:
        epoch = int(message["epoch"])
        if epoch <= self.epoch:
            return []
        if self.is_running or not self._is_specified:
            self._urgent.append(encode("refused", epoch=epoch, reason=f"epoch {self.epoch} runs"))
        else:
            self.epoch, self.is_running = epoch, True
            return [StartRanks(message)]
        return []

    def _is_present(self, message: Message) -> bool:
        return self.is_running and message.get("epoch") == self.epoch

    def _drop_output(self) -> None:
        """Drop the output that waits: the driver has ended the epoch and wants its end soon."""
        self._ordered = deque(entry for entry in self._ordered if entry[0] == 0)
        self._pending_output = self._dropped = 0

    def _note_dropped(self) -> None:
        if self._dropped:
            self._ordered.append((0, encode("dropped", epoch=self.epoch, lines=self._dropped)))
            self._dropped = 0

    def _end(self, reason: str) -> list[Order]:
        self._is_over = True
        self.lease_until_s = self._next_beat_s = inf
        return [EndAgent(reason)]
