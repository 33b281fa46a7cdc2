"""One loop for all retries: of operations that fail, or whose result is not there yet."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def retry_until(
    deadline_s: float,
    attempt: Callable[[], T | None],
    *,
    every_s: float,
    retried: tuple[type[Exception], ...] = (),
    stopped: Callable[[], bool] = lambda: False,
) -> T | None:
    """Call `attempt` until it returns a result, and return the result.

    Args:
        deadline_s: by `time.monotonic()`; no attempt begins after it. math.inf for none.
        attempt: returns None to be called again.
        every_s: the pause between two attempts.
        retried: exceptions of an attempt that count as None; all others are raised.
        stopped: called before each attempt; True ends the loop.

    Returns:
        The result of `attempt`; None after the deadline, or when stopped.
    """
    while not stopped() and time.monotonic() < deadline_s:
        try:
            result = attempt()
        except retried:
            result = None
        if result is not None:
            return result
        time.sleep(every_s)
    return None
