"""Sleep until a word in shared memory changes, and wake the sleepers: futex(2) of Linux by ctypes.

A sleeper needs no processor time and wakes within microseconds. This matters where there are more
ranks than cores. On systems without futex, a sleep lasts NAP_S."""

from __future__ import annotations

import ctypes
import platform
import sys
import time
from collections.abc import Callable
from typing import Any

SYSCALL_NUMBER = (
    {"x86_64": 202, "aarch64": 98}.get(platform.machine(), -1) if sys.platform == "linux" else -1
)
# Arguments of futex(2): two operations, and the number of sleepers to wake.
WAIT, WAKE, ALL = 0, 1, 2**31 - 1
NAP_S = 200e-6


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _syscall() -> Callable[..., Any] | None:
    if SYSCALL_NUMBER < 0:
        return None
    function = ctypes.CDLL(None, use_errno=True).syscall
    # system call number, address, operation, value, time-out
    function.argtypes = (
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_void_p,
    )
    function.restype = ctypes.c_long
    return function


_FUTEX = _syscall()  # None on systems without futex


def futex_wait(address: int, value: int, limit_s: float) -> None:
    """Sleep until woken, or for `limit_s`. Return at once if the word no longer has `value`.

    The kernel compares the lowest 32 bits and falls asleep in one step, so no wake is lost.
    """
    if _FUTEX is None:
        time.sleep(min(NAP_S, limit_s))
        return
    limit = _Timespec(int(limit_s), int(limit_s % 1 * 1e9))
    # ctypes releases the interpreter's lock in the call: other threads can run.
    _FUTEX(SYSCALL_NUMBER, address, WAIT, value & 0xFFFFFFFF, ctypes.addressof(limit))


def futex_wake(address: int) -> int:
    """Wake all processes and threads that sleep on a word.

    Returns: the number of sleepers; 0 on systems without futex.
    """
    return 0 if _FUTEX is None else int(_FUTEX(SYSCALL_NUMBER, address, WAKE, ALL, None))
