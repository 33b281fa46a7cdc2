"""Updates that the backups of a shard have acknowledged, and the answers that wait for them.

primary   applies update 6, keeps its answer           both backups have update 6: answers
               └─ ReplicateUpdate ──> backup a ── Acknowledged ──┐           │
               └─ ReplicateUpdate ──> backup b ── Acknowledged ──┴───────────┘

So a worker learns of nothing that could be lost with the primary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from shoal.parameter_server.events import InSync, Outgoing


@dataclass
class DeferredReplies:
    """Answers that wait for acknowledgements up to `clock`."""

    clock: int
    answers: list[Outgoing]


class AckTracker:
    """Acknowledgements of one shard's backups.

    Attributes:
        clocks: backup -> partition -> how many of its updates the backup is known to have; -1
            before its first acknowledgement.
    """

    def __init__(self) -> None:
        self.clocks: dict[int, dict[int, int]] = {}
        self._unfilled: dict[int, set[int]] = {}
        self._deferred: dict[int, deque[DeferredReplies]] = {}

    def expect(self, backup: int, clocks: Mapping[int, int]) -> None:
        """Wait for a backup from now on; it has `clocks` updates of each partition."""
        self.clocks[backup] = dict(clocks)
        self._unfilled[backup] = set()

    def remove(self, backup: int) -> None:
        """Stop waiting for a backup. Call `release` for each partition afterwards."""
        self.clocks.pop(backup, None)
        self._unfilled.pop(backup, None)

    def reset(self, partition: int) -> None:
        """Drop the answers that wait: the partition is at another step now."""
        self._deferred[partition] = deque()

    def forget(self, partition: int) -> None:
        """Remove a partition that has migrated to another shard."""
        del self._deferred[partition]
        for backup, clocks in self.clocks.items():
            clocks.pop(partition, None)
            self._unfilled[backup].discard(partition)

    def cap_clock(self, partition: int, clock: int) -> None:
        """Record that no backup has more than `clock` updates of a partition."""
        for clocks in self.clocks.values():
            clocks[partition] = clock

    def expect_snapshot(self, backup: int, partition: int) -> None:
        """Record that a snapshot of the partition is on its way to the backup."""
        self._unfilled[backup].add(partition)

    def on_ack(self, backup: int, partition: int, clock: int, filled: bool) -> list[Outgoing]:
        """Record that a backup has all updates of a partition before `clock`.

        Args:
            filled: it has acknowledged a snapshot.

        Returns:
            Answers that may be sent now, and `InSync` after the backup's last snapshot.
        """
        self.clocks[backup][partition] = max(clock, self.clocks[backup].get(partition, 0))
        out = self.release(partition)
        if filled and partition in self._unfilled[backup]:
            self._unfilled[backup].remove(partition)
            out += [] if self._unfilled[backup] else [InSync(backup)]
        return out

    def defer(self, partition: int, clock: int, answers: list[Outgoing]) -> list[Outgoing]:
        """Keep answers back before all backups have a partition's updates before `clock`.

        Returns:
            Answers that may be sent now: these too, where no backup is missing.
        """
        if answers:
            self._deferred[partition].append(DeferredReplies(clock, answers))
        return self.release(partition)

    def release(self, partition: int) -> list[Outgoing]:
        """Return, once, the answers of a partition that all backups allow, in their order."""
        safe = min((clocks.get(partition, 0) for clocks in self.clocks.values()), default=inf)
        released: list[Outgoing] = []
        deferred = self._deferred[partition]
        while deferred and deferred[0].clock <= safe:
            released += deferred.popleft().answers
        return released
