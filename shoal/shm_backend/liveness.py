"""The other processes of the host: whether they live. The kernel says so at once when one has
died, however it died.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Mapping

from shoal.platform.processes import process_state


class PeerLiveness:
    """Processes to look after. Any thread may ask.

    Args: pids: by rank. They are alive now.
    """

    def __init__(self, pids: Mapping[int, int]) -> None:
        self.pids = pids
        self._poll, self._lock = (
            select.poll(),
            threading.Lock(),
        )  # two threads cannot poll one object at once
        self._ranks: dict[int, int] = {}
        for rank, pid in pids.items():
            with contextlib.suppress(
                OSError, AttributeError
            ):  # an old kernel: then only the time-out tells
                descriptor = os.pidfd_open(pid)
                self._ranks[descriptor] = rank
                self._poll.register(descriptor, select.POLLIN)

    def dead(self) -> list[int]:
        """Ranks whose processes have ended."""
        with self._lock:
            return [self._ranks[descriptor] for descriptor, _ in self._poll.poll(0)]

    def has_ended(self, rank: int, limit_s: float) -> bool:
        """Wait up to `limit_s` for a process to end; True if it has.

        The connections of a process close a moment before the kernel reports its end.
        """
        end_s = time.monotonic() + limit_s
        while rank not in self.dead():
            if time.monotonic() > end_s:
                return False
            time.sleep(1e-3)
        return True

    def state(self, rank: int) -> str:
        """What a process that does not come is doing, as the end of a sentence."""
        letter = process_state(self.pids[rank])
        if letter is None:
            return "has ended"
        return {"T": "is stopped (SIGSTOP)", "t": "is stopped by a debugger", "Z": "has ended"}.get(
            letter, "is alive"
        )

    def close(self) -> None:
        """Look after nobody any more."""
        with self._lock:
            for descriptor in self._ranks:
                os.close(descriptor)
            self._ranks.clear()
            self._poll = select.poll()
