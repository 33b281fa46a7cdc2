"""A trial in a forked child: its verdict arrives, its effects do not, and its end is told."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from shoal.testing import world
from shoal.trial import LossKind, LossVerdict, child_process
from shoal.trial.child_process import judged_in_child
from shoal.trial.judge_loss import try_loss


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


def resident_kib() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


M_MMAP_THRESHOLD = -3
"""Of mallopt in malloc.h: bytes from which a block is mapped by itself, and returned when freed."""


def memory_of_a_trial() -> float:
    """Return the memory that a trial takes beside its parent's, in sizes of the model.

    By default glibc raises its threshold to the size of the blocks that were freed. Then freed
    gradients lie in the heap, and one run in ten has a peak of 4 sizes where the others have 2.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16)))
    x = torch.randn(8, 1024)
    before = resident_kib()
    verdict = judged_in_child(lambda: try_loss(lambda x: model(x).mean(), (x,), {}, 8, [model]))
    assert verdict.kind is LossKind.MEAN
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return (peak - before) * 1024 / sum(p.nbytes for p in model.parameters())


def test_a_trial_takes_about_the_memory_of_a_step() -> None:
    (sizes,) = world.run(1, memory_of_a_trial)
    assert 1.0 < sizes < 3.0  # a copy of the weights, gradients of one pass, and sums of the others


def test_a_child_that_cannot_differentiate_leaves_it_to_its_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert child_process.computed_in_child(os.getpid, str) != os.getpid()
    monkeypatch.setattr(child_process, "_can_differentiate", lambda: False)
    assert child_process.computed_in_child(os.getpid, str) == os.getpid()
