"""The time between two looks at the words of ranks.

At most MAX_LOOK_S of it counts. So nobody is late because the launcher itself was stopped, or the
host was suspended.
"""

from __future__ import annotations

MAX_LOOK_S = 2.0


class LookClock:
    """Measures the time between looks on one clock, which the caller reads."""

    def __init__(self) -> None:
        self._last_s: float | None = None

    def passed_s(self, now_s: float) -> float:
        """Return the seconds that count since the last call; 0 in the first one."""
        before_s, self._last_s = self._last_s, now_s
        return 0.0 if before_s is None else min(max(now_s - before_s, 0.0), MAX_LOOK_S)
