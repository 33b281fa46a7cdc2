"""Event log of a shard: which push made which values, and which values a worker read.

    partition 3    clock 7 ── push of worker 1, step 4 ──> clock 8 ── push of worker 0, step 4 ──> 9
                                                             └ read by worker 1, for its step 5

Values are identified by partition and clock, so the logs of several shards may be merged in any
order."""

from __future__ import annotations

from typing import Literal, NamedTuple

PIECE_EVENTS = 8192
"""Events of one message: about 300 KiB."""


class Event(NamedTuple):
    """One event.

    Attributes:
        kind: `a`: an update was applied. `r`: values were read as the answer to a push. `p`: values
            were pulled while nobody pushed.
        part: number of the partition.
        clock: updates that the partition had taken: before this one, or in the values read.
        step: of the push; of a read, how many of the worker's own steps the values include, which
            is its next step.
    """

    kind: Literal["a", "r", "p"]
    part: int
    clock: int
    worker: int
    step: int


class EventLog:
    """Events since a shard began to record, without those that are known to have arrived."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._first = 0

    def add(self, event: Event) -> None:
        self._events.append(event)

    def chunk(self, first: int) -> tuple[int, list[Event], bool]:
        """Return the events of one message, from number `first` on.

        The request shows that the events before `first` have arrived, so they are deleted.

        Returns:
            The number of the first event, the events, and whether there are more.
        """
        del self._events[: max(0, first - self._first)]
        self._first = max(self._first, first)
        return self._first, self._events[:PIECE_EVENTS], len(self._events) > PIECE_EVENTS
