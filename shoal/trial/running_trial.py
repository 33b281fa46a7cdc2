"""The trial that is running, if one is, for functions that must not run inside of one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shoal.trial.loss_verdict import CannotTry

_depth = 0


@contextmanager
def running() -> Iterator[None]:
    """Let `end_trial` know that a trial runs inside of the block."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def is_trial_running() -> bool:
    """Return True inside of a trial, whose batches have few samples."""
    return _depth > 0


def end_trial() -> None:
    """End a trial if one is running; else do nothing. Nothing is announced.

    To be called first by functions that take part in communication, such as `run.gather`: whoever
    calls them knows that the samples of a batch influence one another.

    Raises: CannotTry: a trial is running.
    """
    if _depth:
        raise CannotTry("")
