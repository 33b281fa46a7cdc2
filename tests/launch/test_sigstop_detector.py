"""Ranks that are stopped by real signals; the polls follow each other without a delay."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.launch import rank_monitor
from shoal.launch.rank_monitor import STOPPED_LOOKS, SigstopDetector
from shoal.platform.processes import process_state

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="looks into /proc")


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    monkeypatch.setattr(rank_monitor, "POLL_S", 0.0)
    with contextlib.ExitStack() as stack:
        processes = []
        for number in range(2):
            program = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
            process = stack.enter_context(subprocess.Popen(program))
            stack.callback(process.kill)
            processes.append(SimpleNamespace(number=number, pid=process.pid, process=process))
        yield processes


def send(rank: Any, number: signal.Signals) -> None:
    rank.process.send_signal(number)
    while (process_state(rank.pid) == "T") != (number == signal.SIGSTOP):
        pass


def test_a_rank_that_others_wait_for_fails_once_after_eight_polls(ranks: list[Any]) -> None:
    detector = SigstopDetector()
    send(ranks[1], signal.SIGSTOP)
    assert [detector.poll(ranks) for _ in range(STOPPED_LOOKS - 1)] == [[]] * (STOPPED_LOOKS - 1)
    (failure,) = detector.poll(ranks)
    assert (failure.rank, failure.code) == (1, 128 + signal.SIGSTOP)
    assert f"kill -CONT {ranks[1].pid}" in failure.headline
    assert detector.poll(ranks) == []


def test_a_rank_that_continues_in_between_does_not_fail(ranks: list[Any]) -> None:
    detector = SigstopDetector()
    for _ in range(3):
        send(ranks[1], signal.SIGSTOP)
        assert [detector.poll(ranks) for _ in range(STOPPED_LOOKS - 1)] == [[]] * (
            STOPPED_LOOKS - 1
        )
        send(ranks[1], signal.SIGCONT)
        assert detector.poll(ranks) == []


def test_no_rank_fails_where_all_are_stopped(ranks: list[Any]) -> None:
    detector = SigstopDetector()
    for rank in ranks:
        send(rank, signal.SIGSTOP)
    assert [detector.poll(ranks) for _ in range(STOPPED_LOOKS)] == [[]] * STOPPED_LOOKS
