"""Ranks that were stopped by a signal and do not go on: others wait for them, and would for
ever.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence

from shoal.launch.failure import Failure
from shoal.launch.ranks import Rank
from shoal.platform.processes import process_state

POLL_S = 1.0
STOPPED_LOOKS = 8
"""How often in a row a rank is found stopped before it is given up. Counted, for a launcher may
be stopped itself.
"""


class SigstopDetector:
    """Looks at ranks once a second, where the system tells of their state (Linux)."""

    def __init__(self) -> None:
        self._looks: dict[int, int] = {}
        self._last_s = time.monotonic()

    def poll(self, ranks: Sequence[Rank]) -> list[Failure]:
        """Those that have been stopped for too long while another was not. A debugger's stop is
        none.
        """
        now = time.monotonic()
        if now < self._last_s + POLL_S:
            return []
        self._last_s = now
        stopped = [rank for rank in ranks if process_state(rank.pid) == "T"]
        self._looks = {rank.number: self._looks.get(rank.number, 0) + 1 for rank in stopped}
        if len(stopped) == len(ranks):  # nobody waits for them
            return []
        return [_failure(rank) for rank in stopped if self._looks[rank.number] == STOPPED_LOOKS]


def _failure(rank: Rank) -> Failure:
    headline = (
        f"was stopped by a signal (SIGSTOP), and was not let go on for {STOPPED_LOOKS * POLL_S:g} "
        "s, while others "
        f"waited for it. Within that time `kill -CONT {rank.pid}` would have; without it, start "
        "the same command again"
    )
    return Failure(
        rank.number,
        time.monotonic(),
        headline,
        "",
        is_secondary=False,
        code=128 + signal.SIGSTOP,
        is_loss=True,
    )
