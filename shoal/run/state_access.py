"""Requests for state: Shoal itself may see shards, a user's script may not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_by_shoal: ContextVar[bool] = ContextVar("by_shoal", default=False)


@contextmanager
def access_by_shoal() -> Iterator[None]:
    """Mark this thread's requests for state as Shoal's own, which may see shards."""
    token = _by_shoal.set(True)
    try:
        yield
    finally:
        _by_shoal.reset(token)


def is_access_by_shoal() -> bool:
    """Return True within `access_by_shoal`."""
    return _by_shoal.get()
