"""Retries, and their end."""

from __future__ import annotations

import math
import time

import pytest

from shoal.parameter_server.coordinator.watch import retry_until


class Attempts:
    """An attempt with given outcomes, one for each call."""

    def __init__(self, *outcomes: object) -> None:
        self.left = list(outcomes)

    def __call__(self) -> object:
        outcome = self.left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def test_attempts_continue_to_the_first_result_and_no_further() -> None:
    attempts = Attempts(None, None, "found", "not asked for")
    assert retry_until(math.inf, attempts, every_s=0) == "found"
    assert attempts.left == ["not asked for"]


def test_a_retried_error_leads_to_one_more_attempt() -> None:
    attempts = Attempts(ConnectionResetError(), TimeoutError(), 0)
    assert retry_until(math.inf, attempts, every_s=0, retried=(OSError,)) == 0


def test_any_other_error_is_raised_at_once() -> None:
    attempts = Attempts(ConnectionResetError(), KeyError("other"), 0)
    with pytest.raises(KeyError, match="other"):
        retry_until(math.inf, attempts, every_s=0, retried=(OSError,))
    assert attempts.left == [0]


def test_no_attempt_begins_after_the_deadline() -> None:
    attempts = Attempts("too late")
    assert retry_until(time.monotonic(), attempts, every_s=0) is None
    assert attempts.left == ["too late"]


def test_a_deadline_ends_attempts_that_find_nothing() -> None:
    deadline_s = time.monotonic() + 0.05
    assert retry_until(deadline_s, lambda: None, every_s=0.001) is None
    assert time.monotonic() >= deadline_s


def test_a_stopped_loop_makes_no_more_attempts() -> None:
    attempts = Attempts(None, None, "not asked for")
    stopped = lambda: len(attempts.left) == 1  # noqa: E731
    assert retry_until(math.inf, attempts, every_s=0, stopped=stopped) is None
    assert attempts.left == ["not asked for"]
