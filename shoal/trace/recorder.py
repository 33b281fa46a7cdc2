"""Notes spans on one rank. Until it is turned on it notes nothing, and whoever could tell it
something does not.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from shoal.trace.span import BLOCKED, EXCHANGE, Span

_NOTHING = nullcontext()


class InFlight:
    """An exchange under way.

    Attributes:
        end_ns: when it was complete; None before.
    """

    def __init__(self, span: Span, now: Callable[[], int]) -> None:
        self.span, self._now = span, now
        self.end_ns: int | None = None

    def finish(self) -> None:
        """It is complete. Said twice, the first time counts."""
        if self.end_ns is None:
            self.end_ns = self._now()


class Recorder:
    """What one rank did when. Any thread may tell it of exchanges; all else belongs to the thread
    that takes steps.

    Args: now: a monotonic clock, in nanoseconds; alike in all processes of a host.

    Attributes: on: whether anything is noted. Look before you make something up for it. touched_ns:
        when a gradient or an exchange was last seen to begin: the thread that takes steps computed
        then.
    """

    def __init__(self, now: Callable[[], int] = time.monotonic_ns) -> None:
        self.now, self.on, self.touched_ns = now, False, 0
        self._about = ""
        self._spans: list[Span] = []
        self._flights: list[InFlight] = []
        self._numbers: Counter[str] = Counter()
        self._lock, self._thread = threading.Lock(), 0

    def begin(self) -> None:
        """From now on, on this thread."""
        self._spans, self._flights, self._numbers = [], [], Counter()
        self._thread, self.on = threading.get_ident(), True

    def end(self) -> list[Span]:
        """All that was noted, in the order of beginnings. What is still under way ends now."""
        self.on = False
        now = self.now()
        with self._lock:
            flown = [
                f.span._replace(end_ns=now if f.end_ns is None else f.end_ns) for f in self._flights
            ]
        return sorted([*self._spans, *flown], key=lambda span: (span.start_ns, -span.end_ns))

    def note(self, kind: str, name: str, start_ns: int, end_ns: int) -> None:
        """Something that is over."""
        if self.on and end_ns > start_ns:
            self._spans.append(Span(kind, name, start_ns, end_ns))

    def during(self, kind: str, name: str) -> AbstractContextManager[None]:
        """What happens inside is a span."""
        return self._during(kind, name) if self.on else _NOTHING

    @contextmanager
    def _during(self, kind: str, name: str) -> Iterator[None]:
        start_ns = self.now()
        try:
            yield
        finally:
            self.note(kind, name, start_ns, self.now())

    def tagged(self, text: str) -> AbstractContextManager[None]:
        """Exchanges that begin inside are for this: micro-batch "F3", say."""
        return self._tagging(text) if self.on else _NOTHING

    @contextmanager
    def _tagging(self, text: str) -> Iterator[None]:
        before, self._about = self._about, text
        try:
            yield
        finally:
            self._about = before

    def start(self, name: str, size_bytes: int, meeting: str, ranks: tuple[int, ...]) -> InFlight:
        """This rank has come to an exchange."""
        name = f"{name} {self._about}" if self._about and self.is_mine else name
        with self._lock:
            number = self._numbers[meeting]
            self._numbers[meeting] += 1
            now = self.now()
            flight = InFlight(
                Span(EXCHANGE, name, now, now, size_bytes, meeting, number, ranks), self.now
            )
            self._flights.append(flight)
        return flight

    def blocked(self, flight: InFlight, start_ns: int) -> None:
        """The calling thread has done nothing but wait for an exchange, until now."""
        if self.on and self.is_mine:
            self.touched_ns = now = self.now()
            span = flight.span
            self._spans.append(
                Span(BLOCKED, span.name, start_ns, now, 0, span.collective_id, span.number)
            )

    def mark_active(self) -> None:
        """The thread that takes steps is computing."""
        self.touched_ns = self.now()

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread is the one that takes steps."""
        return threading.get_ident() == self._thread
