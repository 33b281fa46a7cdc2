"""Detection of ranks that are stopped (SIGSTOP) and not continued.

The other ranks wait for such a rank, and would wait for ever.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence

from shoal.launch.failure import Failure
from shoal.launch.rank_set import RankHandle
from shoal.platform.processes import process_state

POLL_S = 1.0
STOPPED_LOOKS = 8
"""Polls in a row that find a rank stopped before it counts as failed. They are counted, and no
time is measured, because the launcher may be stopped itself.
"""


class SigstopDetector:
    """Polls the states of ranks once a second, where the system reports them (Linux).

    Args:
        has_all: it sees all ranks of the world. Where all that it sees are stopped, others may wait
            for them only if there are others.
    """

    def __init__(self, has_all: bool = True) -> None:
        self._has_all = has_all
        self._looks: dict[int, int] = {}
        self._last_s = time.monotonic()

    def poll(self, ranks: Sequence[RankHandle]) -> list[Failure]:
        """Return the failures of ranks that are stopped for too long while another one runs.

        A debugger's stop has another state and does not count.
        """
        now = time.monotonic()
        if now < self._last_s + POLL_S:
            return []
        self._last_s = now
        stopped = [rank for rank in ranks if process_state(rank.pid) == "T"]
        self._looks = {rank.number: self._looks.get(rank.number, 0) + 1 for rank in stopped}
        if self._has_all and len(stopped) == len(ranks):  # no rank waits for them
            return []
        return [_failure(rank) for rank in stopped if self._looks[rank.number] == STOPPED_LOOKS]


def _failure(rank: RankHandle) -> Failure:
    headline = (
        f"was stopped by a signal (SIGSTOP), and was not let go on for {STOPPED_LOOKS * POLL_S:g} "
        f"s, while others waited for it. Within that time `kill -CONT {rank.pid}` would have; "
        "without it, start the same command again"
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
