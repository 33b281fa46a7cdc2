"""The progress of a world's ranks as `rank_monitor` sees it, on this host or on several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from shoal.watchdog.progress_word import RankProgress

SECONDS_BETWEEN_LOOKS = 1.0

Halt = Literal["", "stopped", "traced"]
"""Nothing; all ranks are stopped by a signal; one of them is in a debugger."""


@dataclass(frozen=True)
class Look:
    """The result of a look at the ranks.

    Attributes:
        progress: of the ranks that live and have written.
        passed_s: the time since the last look at each of these. A host that has not been heard of
            since then counts none.
        halt: why nobody can be late now.
    """

    progress: Mapping[int, RankProgress]
    passed_s: Mapping[int, float]
    halt: Halt


class ProgressSource(Protocol):
    """The words of the ranks of one start, and the way to their stacks."""

    @property
    def hang_limit_s(self) -> float:
        """The limit after which a rank is late; 0 for none."""

    @property
    def world(self) -> int:
        """The number of ranks."""

    def look(self) -> Look:
        """Return the progress of the ranks that live."""

    def name_slow(self, rank: int) -> None:
        """Let the ranks know that one of them is slow, for their log."""

    def host(self, rank: int) -> str:
        """Return the name of the rank's host; empty where there is one host only."""

    def stacks(self, rank: int) -> str:
        """Return the stacks of all threads of a rank, with a first line, or why there are none."""
