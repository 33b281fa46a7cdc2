"""Spans, pieces of time with a kind and a name, and their recorder on one rank.

      thread of the steps      during, note, tagged, blocked, mark_active
      any other thread         start ── InFlight ── finish            an exchange

The recorder is off at first and records nothing. Callers look at `on` before they prepare anything
for it, so that a run without a trace pays almost nothing.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

STEP = "step"
DATA = "data"
FORWARD = "forward"
BACKWARD = "backward"
OPTIMIZER = "optimizer"
ASIDE = "aside"
BLOCKED = "blocked"
EXCHANGE = "exchange"
KINDS = (STEP, DATA, FORWARD, BACKWARD, OPTIMIZER, ASIDE, BLOCKED, EXCHANGE)
"""The kinds of spans:

- STEP: from the end of one optimizer step to the end of the next.
- DATA, FORWARD, BACKWARD, OPTIMIZER: phases of a step.
- ASIDE: an evaluation or a save between two steps.
- BLOCKED: the training thread waits for an exchange and computes nothing.
- EXCHANGE: a collective or a message, from the moment when this rank enters it.
"""


class Span(NamedTuple):
    """A piece of time.

    Attributes:
        kind: one of KINDS.
        start_ns, end_ns: on the clock of its rank; on rank 0's clock in a trace of several ranks.
        size_bytes: of an exchange: the size of the tensors that this rank sends or receives.
        collective_id: of an exchange: its group, or its sender and receiver in the group. Of a
            BLOCKED: that of the exchange it waits for; "" if it waits for any that is in flight.
        number: index of the exchange among those of one collective_id. All ranks enter them in the
            same order, so the number is the same on all ranks.
        ranks: of an exchange: ranks of the world for which this rank has to wait. For a broadcast
            that is the root, for a message its sender.
    """

    kind: str
    name: str
    start_ns: int
    end_ns: int
    size_bytes: int = 0
    collective_id: str = ""
    number: int = 0
    ranks: tuple[int, ...] = ()

    @property
    def interval(self) -> tuple[int, int]:
        """Return start and end, in nanoseconds."""
        return self.start_ns, self.end_ns

    def moved(self, by_ns: int) -> Span:
        """Return the span on a clock that is `by_ns` ahead."""
        return self._replace(start_ns=self.start_ns + by_ns, end_ns=self.end_ns + by_ns)


_NO_SPAN = nullcontext()


class InFlight:
    """An exchange in flight.

    Attributes:
        end_ns: time at which it was complete; None before.
    """

    def __init__(self, span: Span, now: Callable[[], int]) -> None:
        self.span = span
        self.end_ns: int | None = None
        self._now = now

    def finish(self) -> None:
        """Record that the exchange is complete. Only the first call counts."""
        if self.end_ns is None:
            self.end_ns = self._now()


class Recorder:
    """Records the spans of one rank.

    Any thread may record exchanges. All other methods belong to the training thread: the one that
    called `begin`.

    Args:
        now: a monotonic clock, in nanoseconds; the same for all processes of a host.

    Attributes:
        on: spans are recorded.
        touched_ns: latest time at which the training thread is known to have computed: a gradient
            was ready, or an exchange began.
    """

    def __init__(self, now: Callable[[], int] = time.monotonic_ns) -> None:
        self.now = now
        self.on = False
        self.touched_ns = 0
        self._tag = ""
        self._spans: list[Span] = []
        self._in_flight: list[InFlight] = []
        self._counts: Counter[str] = Counter()  # exchanges by collective_id
        self._lock = threading.Lock()
        self._thread = 0

    def begin(self) -> None:
        """Start to record. The calling thread is the training thread from now on."""
        self._spans = []
        self._in_flight = []
        self._counts = Counter()
        self._thread = threading.get_ident()
        self.on = True

    def end(self) -> list[Span]:
        """Stop, and return all spans sorted by start. An exchange that is still in flight ends
        now.
        """
        self.on = False
        now = self.now()
        with self._lock:
            exchanges = [
                flight.span._replace(end_ns=now if flight.end_ns is None else flight.end_ns)
                for flight in self._in_flight
            ]
        return sorted([*self._spans, *exchanges], key=lambda span: (span.start_ns, -span.end_ns))

    def note(self, kind: str, name: str, start_ns: int, end_ns: int) -> None:
        """Record a span that has ended."""
        if self.on and end_ns > start_ns:
            self._spans.append(Span(kind, name, start_ns, end_ns))

    def during(self, kind: str, name: str) -> AbstractContextManager[None]:
        """Record the time of a `with` block as a span."""
        return self._during(kind, name) if self.on else _NO_SPAN

    @contextmanager
    def _during(self, kind: str, name: str) -> Iterator[None]:
        start_ns = self.now()
        try:
            yield
        finally:
            self.note(kind, name, start_ns, self.now())

    @contextmanager
    def tagged(self, text: str) -> Iterator[None]:
        """Add a text to the names of exchanges that begin in a `with` block: "F3", for example."""
        before, self._tag = self._tag, text
        try:
            yield
        finally:
            self._tag = before

    def start(
        self, name: str, size_bytes: int, collective_id: str, ranks: tuple[int, ...]
    ) -> InFlight:
        """Record that this rank enters an exchange. The arguments are those of `Span`."""
        if self._tag and self.is_mine:
            name = f"{name} {self._tag}"
        with self._lock:
            number = self._counts[collective_id]
            self._counts[collective_id] += 1
            now = self.now()
            span = Span(EXCHANGE, name, now, now, size_bytes, collective_id, number, ranks)
            flight = InFlight(span, self.now)
            self._in_flight.append(flight)
        return flight

    def blocked(self, flight: InFlight, start_ns: int) -> None:
        """Record that the calling thread has waited for an exchange from `start_ns` to now."""
        if self.on and self.is_mine:
            now = self.now()
            self.touched_ns = now
            span = flight.span
            self._spans.append(
                Span(BLOCKED, span.name, start_ns, now, 0, span.collective_id, span.number)
            )

    def mark_active(self) -> None:
        """Record that the training thread computes now."""
        self.touched_ns = self.now()

    @property
    def is_mine(self) -> bool:
        """Return whether the calling thread is the training thread."""
        return threading.get_ident() == self._thread
