"""A trial in a forked child: its verdict arrives, its effects do not, and its end is told."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from shoal.trial import LossKind, LossVerdict, child_process
from shoal.trial.child_process import judged_in_child


class Calls:
    count = 0


def test_a_verdict_arrives_whole_and_the_effects_of_the_trial_do_not() -> None:
    expected = LossVerdict(LossKind.COUPLED, 0.25, (1, 3, 4), "a cause")

    def judge() -> LossVerdict:
        Calls.count += 1
        return expected

    assert judged_in_child(judge) == expected
    assert Calls.count == 0


def killed() -> LossVerdict:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def failing() -> LossVerdict:
    raise ValueError("no such table")


def sleeping() -> LossVerdict:
    time.sleep(100)
    raise AssertionError


@pytest.mark.parametrize(
    ("judge", "reason"),
    [
        (killed, "its trial in a process of its own was killed"),
        (failing, "its trial fails with ValueError: no such table"),
        (sleeping, "its trial in a process of its own did not end within 0 s"),
    ],
)
def test_a_trial_without_a_verdict_counts_as_not_tried_and_says_why(
    judge: Callable[[], LossVerdict], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if judge is sleeping:
        monkeypatch.setattr(child_process, "CHILD_S", 0.2)
    verdict = judged_in_child(judge)
    assert (verdict.kind, verdict.reason) == (LossKind.NOT_JUDGED, reason)
