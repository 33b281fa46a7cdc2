"""What a shard notes while it records: which push made which values, and which values a worker was
given.

      part 3    value 7 ── push of worker 1, step 4 ──> value 8 ── push of worker 0, step 4 ──> value 9
                                                          └ read by worker 1, for its step 5

A value is known by its part and its clock, so it does not matter in which order notes of several
shards are read."""

from __future__ import annotations

from typing import Literal, NamedTuple

PIECE_EVENTS = 8192
"""As many as go into one message: about 300 KiB."""


class Event(NamedTuple):
    """One note.

    Attributes: kind: applied, read as the answer to a push, or pulled while nobody pushed. clock:
        updates that the part had taken: before this one, or in the values that were read. step: of
        the push; or how many of the worker's own steps the values include, which is its next step.
    """

    kind: Literal["a", "r", "p"]
    part: int
    clock: int
    worker: int
    step: int


class EventLog:
    """Events since a shard was told to record, kept until they are known to have arrived."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._first = 0

    def add(self, event: Event) -> None:
        self._events.append(event)

    def chunk(self, first: int) -> tuple[int, list[Event], bool]:
        """Events from number `first` on, for one message; those before it have arrived, and are
        forgotten.

        Returns: the number of the first event, the events, and whether there are more.
        """
        del self._events[: max(0, first - self._first)]
        self._first = max(self._first, first)
        return self._first, self._events[:PIECE_EVENTS], len(self._events) > PIECE_EVENTS
