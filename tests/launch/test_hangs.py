"""Ranks that do not come, and processes that die besides ranks: real processes, real signals.

Where a rank hangs for ever, the run goes on because the launcher sees it, tells of it, and starts
all ranks again.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import hang_targets
import pytest

from shoal.errors import LaunchError, UsageError
from shoal.launch.control_channel import ControlServer
from shoal.launch.failure import from_exception
from shoal.launch.restarting import RestartingRun, Work
from shoal.launch.start import prepare
from shoal.watchdog import hang_limit
from tests.harness import local

NOTE = "2 processes start from the beginning, for there is no checkpoint (restart 1 of 3)"


def run(folder: Path, target: Callable[..., None], *arguments: Any, limit_s: float = 0) -> int:
    work = Work(
        f"hang_targets:{target.__name__}",
        (str(folder), "first", *arguments),
        (str(folder), "again", *arguments),
        {hang_limit.VARIABLE: str(limit_s)},
        "first",
        (),
    )
    with ControlServer(folder, "claimed") as control:
        return RestartingRun(work, 2, control, restarts=3).run()


def ended(folder: Path) -> list[str]:
    return [(folder / f"ended.{rank}").read_text() for rank in range(2)]


def test_a_rank_that_sleeps_in_its_step_is_told_with_its_stack_and_the_run_goes_on(tmp_path, capfd):
    assert run(tmp_path, hang_targets.hangs, "sleep", limit_s=1.5) == 0
    assert ended(tmp_path) == ["again", "again"]
    told = capfd.readouterr().err
    headline = (
        "rank 1 of 2 did not come: it is in the forward pass, while rank 0 waits for it in "
        "all_reduce("
    )
    assert told.startswith(headline)
    assert "The stack of rank 1 (process " in told
    assert re.search(r'hang_targets.py", line \d+ in in_step', told)
    assert "The stack of rank 0 (process " in told
    assert "; " + NOTE in told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "strategy", "told"),
    [
        ("gil", "ddp", "it is in the forward pass"),
        ("stop", "ddp", "stopped by a signal"),
        ("data", "ddp", "it is in the wait for data"),
        ("skip", "ddp", "while rank 0 waits for it in barrier"),
        ("sleep", "zero3", "it is in the forward pass"),
        ("sleep", "local=2", "it is in the forward pass"),
        ("gil", "server=1", "it is in the forward pass"),
    ],
)
def test_every_rank_that_hangs_is_named_and_the_run_goes_on(tmp_path, capfd, fault, strategy, told):
    assert run(tmp_path, hang_targets.hangs, fault, strategy, limit_s=3.0) == 0
    assert ended(tmp_path) == ["again", "again"]
    printed = capfd.readouterr().err
    assert "rank 1 of 2 did not come: " in printed
    assert told in printed
    assert NOTE in printed


@pytest.mark.slow
def test_a_slow_rank_is_named_once_and_the_run_goes_on(tmp_path, capfd):
    assert run(tmp_path, hang_targets.spins_off_steps, limit_s=30) == 0
    assert ended(tmp_path) == ["first", "first"]
    told = capfd.readouterr().err
    assert told.count("rank 1 of 2 is slow: in each of its last 20 steps") == 1
    assert told.count("\n") == 1


def test_the_death_of_the_fork_server_is_named_and_the_run_goes_on(tmp_path, capfd):
    assert run(tmp_path, hang_targets.loses_the_fork_server) == 0
    told = capfd.readouterr().err
    expected = r"note: the fork server \(process \d+\), from which ranks are started, was killed by"
    assert re.match(expected + " SIGKILL; " + re.escape(NOTE), told)


def test_a_fork_server_that_is_killed_while_ranks_start_is_named(tmp_path):
    prepare()
    pid = forkserver._forkserver._forkserver_pid
    os.kill(pid, signal.SIGSTOP)  # so that the first rank waits for it
    killer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
    killer.start()
    with pytest.raises(LaunchError, match="the process was killed: start the same command again"):
        local.run(hang_targets.hangs, (str(tmp_path), "again", "none"), 2)
    killer.join()
    # Until the kernel reports its end, the next start would take it for alive.
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.slow
def test_the_death_of_the_spawner_of_helpers_is_named_and_the_run_goes_on(tmp_path, capfd):
    assert run(tmp_path, hang_targets.loses_its_spawner) == 0
    told = capfd.readouterr().err
    assert told.startswith("note: rank 0 of 2 lost the process from which its helpers, such as")
    assert f"it was killed by SIGKILL; {NOTE}" in told


def test_a_lost_loader_worker_is_found_below_the_error_that_wraps_it() -> None:
    text = "DataLoader worker (pid 815) is killed by signal: Killed"
    try:
        try:
            raise RuntimeError(f"{text}. ")
        except RuntimeError as error:
            raise UsageError("a value of another rank") from error
    except UsageError as error:
        failure = from_exception(1, error)
    assert failure.is_loss
    assert failure.summary(2) == f"rank 1 of 2 lost a process of its own: {text}"
    assert not from_exception(1, RuntimeError("DataLoader worker raised")).is_loss
