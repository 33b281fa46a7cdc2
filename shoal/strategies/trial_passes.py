"""The passes of a trial, which computes few samples: strategies measure nothing in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_depth = 0


@contextmanager
def running() -> Iterator[None]:
    """Let `is_trial_running` be True inside of the block."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def is_trial_running() -> bool:
    """Return True inside of a trial."""
    return _depth > 0
