"""A timer of the kernel that kills an agent whose lease is over, where the agent cannot end itself.

An agent that is stopped (SIGSTOP, a debugger) or swapped out does not see that its lease ends, and
its ranks would train on while the driver starts others. The timer needs no process that runs: it
sends SIGKILL, which reaches a stopped process too, and the kernel then kills all ranks of the agent
(see `launch.rank`), stopped ones as well.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from math import inf

# The agent itself comes first unless it is stopped.
AGENT_FIRST_S = 0.4
SIGEV_SIGNAL = 0  # <signal.h>
TIMER_ABSTIME = 1  # <time.h>


class SignalEvent(ctypes.Structure):
    """`struct sigevent`, which has 64 bytes on Linux."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_char * 48),
    )


class TimerTimes(ctypes.Structure):
    """`struct itimerspec`."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("seconds", ctypes.c_long),
        ("nanoseconds", ctypes.c_long),
    )


class LeaseTimer:
    """A timer that sends SIGKILL to this process. It runs on `clock_s`, also while that is stopped.

    Processes that this one forks have no such timer.

    Raises:
        OSError: the system makes no such timer.
    """

    def __init__(self) -> None:
        # timer_create is in the C library, or in librt where that is older than 2021.
        library = ctypes.CDLL(None, use_errno=True)
        if not hasattr(library, "timer_create"):
            library = ctypes.CDLL("librt.so.1", use_errno=True)
        self._set = library.timer_settime
        self._timer = ctypes.c_void_p()
        self._until_s = inf
        event = ctypes.byref(SignalEvent(None, signal.SIGKILL, SIGEV_SIGNAL))
        _check(library.timer_create(time.CLOCK_BOOTTIME, event, ctypes.byref(self._timer)))

    def set(self, until_s: float) -> None:
        """Let the process be killed shortly after `until_s` on `clock_s`, and not before."""
        if until_s == self._until_s:
            return
        self._until_s = until_s
        times = TimerTimes(0, 0, *divmod(int((until_s + AGENT_FIRST_S) * 1e9), 10**9))
        _check(self._set(self._timer, TIMER_ABSTIME, ctypes.byref(times), None))


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
