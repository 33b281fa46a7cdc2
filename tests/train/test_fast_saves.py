"""Saves in a fast directory: what is there, which one is resumed, and whose it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_jobs import EVERYTHING, Undrawn, assert_equal_to_the_bit, everything, tiny, trains
from tiny_jobs import go as goes

from shoal import cli
from shoal.config.job import Job
from shoal.errors import ConfigError
from shoal.testing import world
from shoal.train.run_directory import fast_directory, name_fast_directory


class Lost(Exception):
    """A rank that is lost."""


class StopsAt(Undrawn):
    """Loses its ranks after a step, without any save."""

    def __init__(self, job: Job, step: int) -> None:
        super().__init__(job)
        self.stop_at = step

    def _save_fast(self) -> None:
        super()._save_fast()
        if self.step == self.stop_at:
            raise Lost


def is_lost(job: Job, step: int) -> None:
    with pytest.raises(Lost):
        goes(StopsAt(job, step))


def resumed_step(job: Job) -> int:
    training = Undrawn(job)
    training.resume()
    training.log.close()
    return training.step


def is_lost_and_goes_on(folder: Path) -> None:
    """A run of 12 steps: checkpoints at 3, 4, 6, 8, 9 and 12, and fast saves at 5 and 10."""
    every = {"checkpoint__fast_every_steps": 5}
    alone, job = job_in(folder / "alone"), job_in(folder / "run", folder / "fast", **every)
    trains(alone)
    is_lost(job, 5)
    fast = fast_directory(job.directory, job.checkpoint.fast_dir)
    assert fast is not None
    assert fast.stat().st_mode & 0o777 == 0o700
    memory = fast / "checkpoints"
    assert sorted(path.name for path in memory.glob("step-*")) == ["step-00000005"]
    assert resumed_step(job) == 5
    is_lost(job, 7)
    # The checkpoint of step 6 is newer than any fast save: none was taken beside it.
    assert resumed_step(job) == 6
    is_lost(job, 10)
    # A flipped byte: the older checkpoint on the disk is taken.
    assert resumed_step(job) == 10
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        spoil(next((memory / "step-00000010").glob("*.safetensors")))
    torch.distributed.barrier()
    assert resumed_step(job) == 9
    trains(job)
    torch.distributed.barrier()
    assert_equal_to_the_bit(everything(folder / "run"), everything(folder / "alone"))
    assert not fast.exists(), "it goes when the run ends"


def job_in(folder: Path, fast: Path | None = None, **more: Any) -> Job:
    if fast is not None:
        more = {"checkpoint__fast_dir": str(fast), "checkpoint__fast_every_steps": 2} | more
    return tiny(folder, EVERYTHING, log__tensorboard=False, **more)


def test_a_directory_that_was_made_anew_or_copied_has_no_saves_of_another_run(
    tmp_path: Path,
) -> None:
    job = job_in(tmp_path / "run", tmp_path)
    assert fast_directory(job.directory, str(tmp_path)) is None
    names = []
    for results in (False, False, True):
        (tmp_path / "run/checkpoints").mkdir(parents=True) if results else None
        (tmp_path / "run").mkdir(exist_ok=True)
        name_fast_directory(job)
        names.append(fast_directory(job.directory, str(tmp_path)))
    assert names[0] != names[1], "without results another experiment may begin there"
    assert names[1] == names[2], "a run that goes on finds its saves"
    (tmp_path / "run").rename(tmp_path / "moved")
    assert fast_directory(str(tmp_path / "moved"), str(tmp_path)) not in (None, names[2])
    assert fast_directory(str(tmp_path / "moved"), None) is None


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--checkpoint.fast_every_steps", "0", "-n", "2"], "must be greater than 0"),
        (["--checkpoint.fast_dir", "/dev/shm", "-n", "2", "--record"], "keeps no record of pushes"),
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


def test_a_run_resumes_from_the_newest_of_both_places(tmp_path: Path) -> None:
    world.run(2, is_lost_and_goes_on, tmp_path)


def test_a_fast_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"checkpoint.fast_dir: .*file cannot be written"):
        trains(job_in(tmp_path / "run", tmp_path / "file"))
