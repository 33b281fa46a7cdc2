"""Small file systems that fill up, directories that go away, and files that NFS leaves behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_checkpoint_store import filled, saved
from tiny_jobs import MLP, Undrawn, go, metrics, tiny, trains

from shoal.checkpoint import newest
from shoal.checkpoint.manifest import problems
from shoal.config.job import Job
from shoal.errors import LaunchError
from shoal.testing import world
from shoal.train import run_saver

FILLER = "filler"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    directory = tmp_path / "small"
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", directory], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("this container cannot mount a file system")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", directory], check=True)


def fill(directory: Path) -> None:
    """Write to the file system of `directory` until it is full."""
    with (directory / FILLER).open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)) == 4096:
                pass
        except OSError:
            pass


class LosesItsDisk(Undrawn):
    """Its file system is full after one step; it may be freed later."""

    def __init__(self, job: Job, at: int, free_after_s: float) -> None:
        super().__init__(job)
        self.at, self.free_after_s = at, free_after_s

    def _step(self, batch: Any, epochs: float) -> None:
        super()._step(batch, epochs)
        disk = self.directory.parent
        if self.step == self.at and self.run.rank == 0:
            fill(disk)
            if self.free_after_s:
                threading.Timer(self.free_after_s, (disk / FILLER).unlink).start()


def loses_its_disk(job: Job, at: int, free_after_s: float = 0.0) -> None:
    run_saver.RETRY_S = 1
    go(LosesItsDisk(job, at, free_after_s))


def test_a_last_save_that_gets_room_in_time_succeeds_and_one_that_does_not_ends_the_run(
    small_disk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    waits = {"checkpoint.last_save_wait_s": 20}
    world.run(2, loses_its_disk, tiny(small_disk / "run", MLP, waits), 10, 2.0)
    said = capfd.readouterr().err
    assert "this is the last save: make room, it is tried again for 20 s" in said
    assert newest(small_disk / "run/checkpoints") == small_disk / "run/checkpoints/step-00000012"
    with pytest.raises(LaunchError, match="No space left"):
        world.run(2, loses_its_disk, tiny(small_disk / "other", MLP), 10)
    (small_disk / FILLER).unlink()
    assert world.run(2, trains, tiny(small_disk / "other", MLP)) == [12, 12]


class LosesItsDirectory(Undrawn):
    """Somebody removes its run directory after step 5."""

    def _step(self, batch: Any, epochs: float) -> None:
        super()._step(batch, epochs)
        if self.step == 5 and self.run.rank == 0:
            shutil.rmtree(self.directory)


def loses_its_directory(job: Job) -> int:
    training = LosesItsDirectory(job)
    go(training)
    return training.step


def test_a_run_directory_that_is_removed_is_told_and_made_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = tiny(tmp_path / "run", MLP)
    assert world.run(2, loses_its_directory, job) == [12, 12]
    assert "was removed or moved while the run trains. It is made again" in capfd.readouterr().err
    assert newest(tmp_path / "run/checkpoints") == tmp_path / "run/checkpoints/step-00000012"
    assert metrics(tmp_path / "run")[-1]["step"] == 12
    assert world.run(2, trains, job) == [12, 12]  # it is a run, and finished


def test_files_that_nfs_keeps_for_others_spoil_no_checkpoint(tmp_path: Path) -> None:
    store = saved(tmp_path, 1, 2, keep=1)
    last = tmp_path / "step-00000002"
    (last / ".nfs0000000012").write_bytes(b"still open elsewhere")
    assert problems(last) == []
    assert newest(tmp_path) == last
    store.save(3, filled(3), {"step": 3})
    assert newest(tmp_path) == tmp_path / "step-00000003"
    assert not last.exists()
