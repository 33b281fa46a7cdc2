"""A limit for each test: one that hangs or crawls fails by name, and the run goes on.

At the limit the main thread gets an error, and the stacks of all threads are written. A test that
does not come back from it, because it waits in C, takes its process with it a little later; xdist
names it and starts another process. What it started is ended by `leftovers`, or by the run.

    @pytest.mark.limit(600)   # seconds, for one that may take longer than its kind
"""

from __future__ import annotations

import faulthandler
import signal
import sys
from collections.abc import Iterator
from types import FrameType

import pytest

EVERYDAY_S, SLOW_S = 180.0, 1800.0
LAST_S = 60.0  # from the error in the main thread to the end of the process


class TestLimitError(Exception):
    """A test has taken longer than its limit."""

    __test__ = False


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "limit(seconds): this test may take longer than its kind")


def limit_of(item: pytest.Item) -> float:
    """Return the limit of a test in seconds."""
    own = item.get_closest_marker("limit")
    if own is not None:
        return float(own.args[0])
    return SLOW_S if item.get_closest_marker("slow") else EVERYDAY_S


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    limit_s = limit_of(item)

    def stop(number: int, frame: FrameType | None) -> None:
        faulthandler.dump_traceback(file=sys.__stderr__)
        raise TestLimitError(f"{item.nodeid} had not ended after {limit_s:g} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    faulthandler.dump_traceback_later(limit_s + LAST_S, exit=True, file=sys.__stderr__)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, previous)
