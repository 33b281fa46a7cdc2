"""What the backups of a shard hold, and the answers that wait for it: a worker is told of nothing
that could be lost.

primary     applies update 6        holds its answer back        both have update 6: answers
                 └─ Applied ──> backup a ── acknowledged ──┐           │
                 └─ Applied ──> backup b ─────────── acknowledged ─────┘
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from shoal.parameter_server.events import InSync, Outgoing


@dataclass
class DeferredReplies:
    """Answers that are held back until backups have acknowledged up to `clock`."""

    clock: int
    answers: list[Outgoing]


class AckTracker:
    """Of one shard.

    Attributes: clocks: of each backup, part -> how many of its updates it is known to have.
    """

    def __init__(self) -> None:
        self.clocks: dict[int, dict[int, int]] = {}
        self._unfilled: dict[int, set[int]] = {}
        self._awaited: dict[int, deque[DeferredReplies]] = {}

    def expect(self, backup: int, clocks: Mapping[int, int]) -> None:
        """Count on a backup, which has so many updates of each part."""
        self.clocks[backup], self._unfilled[backup] = dict(clocks), set()

    def remove(self, backup: int) -> None:
        """Count on it no more; `released` tells for which parts that was all that was waited
        for.
        """
        self.clocks.pop(backup, None)
        self._unfilled.pop(backup, None)

    def begin(self, part: int) -> None:
        """Forget what waits: the part is at another step now."""
        self._awaited[part] = deque()

    def forget(self, part: int) -> None:
        """The part is here no more."""
        del self._awaited[part]
        for backup, clocks in self.clocks.items():
            clocks.pop(part, None)
            self._unfilled[backup].discard(part)

    def cap_clock(self, part: int, clock: int) -> None:
        """No backup has more than so many updates of a part."""
        for clocks in self.clocks.values():
            clocks[part] = clock

    def fill(self, backup: int, part: int) -> None:
        """A whole part is on its way."""
        self._unfilled[backup].add(part)

    def acknowledged(self, backup: int, part: int, clock: int, filled: bool) -> list[Outgoing]:
        """A backup has all updates of a part before `clock`. What may be said now."""
        self.clocks[backup][part] = max(clock, self.clocks[backup].get(part, 0))
        out = self.take_released(part)
        if filled and part in self._unfilled[backup]:
            self._unfilled[backup].remove(part)
            out += [] if self._unfilled[backup] else [InSync(backup)]
        return out

    def hold(self, part: int, clock: int, answers: list[Outgoing]) -> list[Outgoing]:
        """Hold answers back until all backups have a part's updates before `clock`. What may be
        said now.
        """
        if answers:
            self._awaited[part].append(DeferredReplies(clock, answers))
        return self.take_released(part)

    def take_released(self, part: int) -> list[Outgoing]:
        """What nobody has to be waited for any more, once."""
        safe = min((clocks.get(part, 0) for clocks in self.clocks.values()), default=inf)
        free: list[Outgoing] = []
        while self._awaited[part] and self._awaited[part][0].clock <= safe:
            free += self._awaited[part].popleft().answers
        return free
