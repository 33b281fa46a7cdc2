"""Snapshots in memory: what they hold, which one is resumed, and what a kill leaves of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_jobs import EVERYTHING, Undrawn, assert_equal_to_the_bit, everything, tiny, trains
from tiny_jobs import go as goes

from shoal import cli
from shoal.config.job import Job
from shoal.launch import snapshot_memory
from shoal.launch.snapshot_memory import SnapshotMemory
from shoal.testing import world
from shoal.train.checkpoint.host_disks import HostDisks
from shoal.train.snapshot_room import room_problem


class Lost(Exception):
    """A rank that is lost."""


class StopsAt(Undrawn):
    """Loses its ranks after a step, without any save."""

    def __init__(self, job: Job, step: int) -> None:
        super().__init__(job)
        self.stop_at = step

    def _snapshot(self) -> None:
        super()._snapshot()
        if self.step == self.stop_at:
            raise Lost


def is_lost(job: Job, step: int) -> None:
    with pytest.raises(Lost):
        goes(StopsAt(job, step))


def resumed_step(job: Job) -> int:
    training = Undrawn(job)
    training.resume()
    training.snapshots.close()
    training.log.close()
    return training.step


def is_lost_and_goes_on(folder: Path) -> None:
    """A run of 10 steps: checkpoints at 2, 3, 6, 9 and 10, and snapshots at 4 and 8."""
    alone, job = job_in(folder / "alone"), job_in(folder / "run", 2)
    trains(alone)
    is_lost(job, 5)
    memory = Path(os.environ[snapshot_memory.VARIABLE], "checkpoints")
    assert sorted(path.name for path in memory.glob("step-*")) == ["step-00000004"]
    assert resumed_step(job) == 4
    is_lost(job, 7)
    # The checkpoint of step 6 is newer than any snapshot: none was taken beside it.
    assert resumed_step(job) == 6
    is_lost(job, 8)
    # A flipped byte: the older checkpoint on the disk is taken.
    assert resumed_step(job) == 8
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        spoil(next((memory / "step-00000008").glob("*.distcp")))
    torch.distributed.barrier()
    assert resumed_step(job) == 6
    trains(job)
    torch.distributed.barrier()
    assert_equal_to_the_bit(everything(folder / "run"), everything(folder / "alone"))


def job_in(folder: Path, every: int | None = None, **more: Any) -> Job:
    return tiny(folder, EVERYTHING, snapshot__every=every, log__tensorboard=False, **more)


def test_a_host_with_too_little_memory_is_named_with_both_numbers() -> None:
    hosts = HostDisks((0, 0, 1, 2), copies=1)
    mib = float(1 << 20)
    # Two snapshots: the first host holds those of its two ranks, and of the last host's.
    assert room_problem(mib, hosts, 0, 6 << 20) == ""
    problem = room_problem(mib, hosts, 0, 5 << 20)
    assert "on the host of rank 0, two snapshots of 3 ranks' parts need 6 MiB" in problem
    assert "5 MiB are free" in problem
    assert "on the host of rank 2" in room_problem(mib, hosts, 1, 5 << 20)
    assert room_problem(mib, HostDisks((0, 0, 1, 2), copies=0), 0, 4 << 20) == ""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--snapshot.every", "0", "-n", "2"], "snapshot.every"),
        (["--snapshot.every", "-1", "-n", "2"], "must be greater than 0"),
        (["--snapshot.copies", "-1", "-n", "2"], "must not be negative"),
        (["--snapshot.every", "5"], "Start the run with `shoal train -n N` or --hosts"),
        (["--snapshot.every", "5", "-n", "2", "--record"], "keeps no record of pushes"),
    ],
)
def test_what_cannot_be_is_refused_before_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    command = ["train", "digits", "--out", str(tmp_path / "run"), *words]
    if "--record" in words:
        command += ["--strategy", "server=1,staleness=1"]
    with pytest.raises(SystemExit) as stop:
        cli.main(command)
    assert stop.value.code == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def spoil(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 1
    path.write_bytes(contents)


def test_a_run_resumes_from_the_newest_of_snapshots_and_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SnapshotMemory() as memory:
        monkeypatch.setenv(snapshot_memory.VARIABLE, str(memory.path))
        world.run(2, is_lost_and_goes_on, tmp_path)
    assert not memory.path.exists()
