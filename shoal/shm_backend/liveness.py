"""Liveness of the other processes of a host.

A pidfd becomes readable when its process has ended, however it ended, so one poll answers for all
processes without signals or heartbeats."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Mapping, Sequence

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

    def first_ended(self, ranks: Sequence[int], limit_s: float) -> int | None:
        """Wait up to `limit_s` for one of these processes to end; return its rank, None if none.

        The connections of a process close a moment before the kernel reports its end.
        """
        end_s = time.monotonic() + limit_s
        while True:
            ended = [rank for rank in self.dead() if rank in ranks]
            if ended or not ranks or time.monotonic() > end_s:
                return next(iter(ended), None)
            time.sleep(1e-3)

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
