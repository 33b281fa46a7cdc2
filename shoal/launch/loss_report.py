"""The way by which a rank tells its launcher of a process of its own that was lost.

The rank itself may wait for that process for ever, so a thread tells it. The launcher then ends all
ranks, and starts them again where a run can be resumed.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from shoal.launch.failure import Failure

EXIT_LOST = 1


class LossReporter:
    """Sends reports of this rank to its launcher. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._rank = 0

    def attach(self, connection: Connection, rank: int) -> None:
        """Send over `connection` from now on."""
        self._connection, self._rank = connection, rank

    def send(self, event: Any) -> None:
        """Send a Failure or a RankResult of this rank."""
        with self._lock:
            assert self._connection is not None
            self._connection.send(event)

    def lost(self, headline: str) -> None:
        """Report that this rank cannot go on, since it lost a process of its own.

        In a process of another launcher the rank ends instead, so that this launcher acts.

        Args: headline: the rest of a sentence that begins with the rank.
        """
        if self._connection is None:
            print(f"this rank {headline}", file=sys.stderr, flush=True)
            os._exit(EXIT_LOST)
        self.send(
            Failure(
                self._rank,
                time.monotonic(),
                headline,
                "",
                is_secondary=False,
                code=EXIT_LOST,
                is_loss=True,
            )
        )


@functools.cache
def own_reporter() -> LossReporter:
    """Return the reporter of this process."""
    return LossReporter()
