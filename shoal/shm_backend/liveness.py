"""Liveness of the other processes of a host.

A pidfd becomes readable when its process has ended, however it ended, so one poll answers for all
processes without signals or heartbeats."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Mapping

from shoal.platform.processes import process_state


class PeerLiveness:
    """The processes of other ranks. Any thread may call.

    Args: pids: processes by rank. They are alive now.
    """

    def __init__(self, pids: Mapping[int, int]) -> None:
        self.pids = pids
        self._poll = select.poll()
        self._lock = threading.Lock()  # two threads cannot poll one object at the same time
        self._ranks: dict[int, int] = {}
        for rank, pid in pids.items():
            # An old kernel has no pidfd: only the time-out of a call reveals a dead process then.
            with contextlib.suppress(OSError, AttributeError):
                descriptor = os.pidfd_open(pid)
                self._ranks[descriptor] = rank
                self._poll.register(descriptor, select.POLLIN)

    def dead(self) -> list[int]:
        """Return the ranks whose processes have ended."""
        with self._lock:
            return [self._ranks[descriptor] for descriptor, _ in self._poll.poll(0)]

    def has_ended(self, rank: int, limit_s: float) -> bool:
        """Wait up to `limit_s` for a process to end; return True if it has.

        The connections of a process close a moment before the kernel reports its end.
        """
        end_s = time.monotonic() + limit_s
        while rank not in self.dead():
            if time.monotonic() > end_s:
                return False
            time.sleep(1e-3)
        return True

    def state(self, rank: int) -> str:
        """Return the state of a process as the end of a sentence, such as "is alive"."""
        letter = process_state(self.pids[rank])
        if letter is None:
            return "has ended"
        return {"T": "is stopped (SIGSTOP)", "t": "is stopped by a debugger", "Z": "has ended"}.get(
            letter, "is alive"
        )

    def close(self) -> None:
        """Close the descriptors. No rank is reported dead afterwards."""
        with self._lock:
            for descriptor in self._ranks:
                os.close(descriptor)
            self._ranks.clear()
            self._poll = select.poll()
