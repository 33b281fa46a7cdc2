"""Waiting for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], object], limit_s: float = 120.0) -> None:
    """Return once a condition holds; fail where it does not in time."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
