"""The lease of an agent: how long its ranks may run without a word from the driver.

    agent   heartbeat n sent at a_n ───────────────> driver   received at d_n, answers "ok n"
            "ok n": the lease runs until a_n + L              none after it: the host counts as
            past it: end everything, K s at most              stopped at d_n + L + K

The agent counts from its own sending. As a_n lies before d_n, the agent has ended its ranks before
the driver starts new ones, however the two clocks are set; only their rates matter, and K has room
for these. All other times follow from L.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

VARIABLE = "SHOAL_HOSTS_LEASE"


def clock_s() -> float:
    """Return seconds since the system's start, sleep included: a lease ends while a host sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@dataclass(frozen=True)
class LeaseTimes:
    """The times of one run.

    Args:
        lease_s: L.
        kill_s: K, the time in which an agent ends all that it has started.
    """

    lease_s: float = 6.0
    kill_s: float = 2.0

    @property
    def heartbeat_s(self) -> float:
        """Seconds between two heartbeats; three in a row may be lost."""
        return self.lease_s / 4

    @property
    def lost_s(self) -> float:
        """Seconds without a heartbeat after which no rank of the host is alive."""
        return self.lease_s + self.kill_s


def lease_times() -> LeaseTimes:
    """Return the times of this run; tests shorten the lease by a variable."""
    return LeaseTimes(float(os.environ.get(VARIABLE, LeaseTimes.lease_s)))
