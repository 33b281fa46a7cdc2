"""Events of ranks that their processes cannot report themselves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankExited:
    """The end of a rank's process; a negative code is the signal that killed it."""

    rank: int
    code: int
