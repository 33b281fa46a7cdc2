"""Sleeping until a number in shared memory changes, and waking whoever sleeps: Linux's futex(2),
called by ctypes.

Who sleeps costs no computing and is woken in microseconds, which matters where there are more ranks
than cores. Where there is no futex, sleeping is a nap."""

from __future__ import annotations

import ctypes
import platform
import sys
import time
from collections.abc import Callable
from typing import Any

NUMBER = (
    {"x86_64": 202, "aarch64": 98}.get(platform.machine(), -1) if sys.platform == "linux" else -1
)
WAIT, WAKE, ALL = 0, 1, 2**31 - 1
NAP_S = 200e-6


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _syscall() -> Callable[..., Any] | None:
    if NUMBER < 0:
        return None
    function = ctypes.CDLL(None, use_errno=True).syscall
    # number, address, operation, value, time-out
    function.argtypes = (
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_void_p,
    )
    function.restype = ctypes.c_long
    return function


_FUTEX = _syscall()  # None where there is none


def futex_wait(address: int, number: int, limit_s: float) -> None:
    """Sleep while the number at `address` has these lowest 32 bits, but not longer than
    `limit_s`, or until woken.
    """
    if _FUTEX is None:
        time.sleep(min(NAP_S, limit_s))
        return
    limit = _Timespec(int(limit_s), int(limit_s % 1 * 1e9))
    # From here on the interpreter's lock is free: other threads compute.
    _FUTEX(NUMBER, address, WAIT, number & 0xFFFFFFFF, ctypes.addressof(limit))


def futex_wake(address: int) -> int:
    """Wake all that sleep on the number at `address`, in whatever process; how many there were,
    as far as is known.
    """
    return 0 if _FUTEX is None else int(_FUTEX(NUMBER, address, WAKE, ALL, None))
