"""The memory of snapshots: nothing of it is left, however its launcher ends."""

from __future__ import annotations

import os
import select
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from shoal.errors import LaunchError
from shoal.launch import snapshot_memory
from shoal.launch.snapshot_memory import SnapshotMemory, remove_abandoned

# A launcher with a rank: both wait for the end of their input, or for a signal.
HOLDS = """
import os, pathlib, sys
from shoal.launch import snapshot_memory
from shoal.launch.snapshot_memory import SnapshotMemory, share_lock
snapshot_memory.PLACE = pathlib.Path(sys.argv[1])
memory = SnapshotMemory()
(memory.path / "checkpoints").mkdir()
rank = os.fork()
if rank == 0:
    os.close(memory._lock)
    share_lock(memory.path)
    print(memory.path, os.getpid(), memory._keeper.pid, flush=True)
sys.stdin.read()
"""


class Held(NamedTuple):
    launcher: subprocess.Popen[str]
    path: Path
    rank: int
    keeper: int


@contextmanager
def held(place: Path) -> Iterator[Held]:
    launcher = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(place)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    path, rank, keeper = launcher.stdout.readline().split()
    with launcher:
        yield Held(launcher, Path(path), int(rank), int(keeper))


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place of its own: a run beside this test would remove what is abandoned there."""
    monkeypatch.setattr(snapshot_memory, "PLACE", tmp_path)
    return tmp_path


def wait_for_end(pid: int) -> None:
    """Wait for the end of a process that is no child of this one."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    select.select([descriptor], [], [])  # it can be read once the process has ended
    os.close(descriptor)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    wait_for_end(pid)


def test_a_launcher_and_its_rank_that_are_killed_leave_nothing(place: Path) -> None:
    with held(place) as killed:
        assert stat.S_IMODE(killed.path.stat().st_mode) == 0o700
        kill(killed.launcher.pid)
        # The rank may still write: nothing is removed under it, by a next run neither.
        remove_abandoned()
        assert killed.path.exists()
        kill(killed.rank)
        wait_for_end(killed.keeper)
        assert not killed.path.exists()


def test_the_next_run_removes_what_nobody_was_left_to_remove(place: Path) -> None:
    with held(place) as killed:
        for pid in (killed.keeper, killed.launcher.pid, killed.rank):
            kill(pid)
        assert killed.path.exists()
        with SnapshotMemory() as memory:
            assert not killed.path.exists()
            assert memory.path.exists()
        assert not memory.path.exists()


def test_a_system_without_such_memory_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(snapshot_memory, "PLACE", tmp_path / "absent")
    with pytest.raises(LaunchError, match="cannot be written here: No such file"):
        SnapshotMemory()
