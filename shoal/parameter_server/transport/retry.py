"""One loop for what fails, or is not there yet, and is tried again."""

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
    """Call `attempt` until it returns something, and return that.

    Args:
        deadline_s: on the clock of `time.monotonic`; no attempt begins after it. math.inf for none.
        attempt: returns None to be called again.
        every_s: the pause between two attempts.
        retried: exceptions of an attempt that are as good as None; all others are raised.
        stopped: asked before each attempt; True ends the loop.

    Returns:
        What `attempt` returned; None after the deadline, or when stopped.
    """
    while not stopped() and time.monotonic() < deadline_s:
        try:
            found = attempt()
        except retried:
            found = None
        if found is not None:
            return found
        time.sleep(every_s)
    return None
