"""SIGTERM: all ranks save at the same step and exit with 75, and the same command goes on from
there.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tiny_jobs
from tiny_jobs import MLP, assert_equal_to_the_bit, everything, tiny

from shoal import cli
from shoal.checkpoint import newest, read_info
from shoal.checkpoint.store import Division
from shoal.config import to_yaml
from shoal.config.job import Job
from shoal.launch.rank import EXIT_RESTART
from shoal.testing import world
from shoal.train import loop

SHOAL = str(Path(sys.executable).with_name("shoal"))
PATIENT = {**MLP, "data.name": "patient"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("undisturbed") / "run"
    world.run(2, tiny_jobs.trains, tiny(directory, PATIENT))
    return directory


@pytest.mark.slow
def test_a_stopped_command_saves_exits_with_75_and_goes_on_when_run_again(
    tmp_path: Path, undisturbed: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "patient.yaml"
    config.write_text(to_yaml(tiny(tmp_path / "run", PATIENT, data__path=str(tmp_path))))
    command = [SHOAL, "train", str(config), "-n", "2"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        try:
            while len(list(tmp_path.glob("waiting.*"))) < 2:
                assert running.poll() is None, running.communicate()
                time.sleep(0.02)
            running.send_signal(signal.SIGTERM)
            _, said = running.communicate(timeout=60)
        finally:
            running.kill()
    assert running.returncode == EXIT_RESTART, said
    assert "stopped at step 3, and saved; the same command goes on from there" in said
    with pytest.raises(SystemExit) as end:
        cli.main(command[1:])
    again = capfd.readouterr()
    assert end.value.code == 0, again.err
    assert "resumed from" in again.err
    assert "final validation" in again.out
    assert (tmp_path / "run/curves.png").exists()
    assert_equal_to_the_bit(everything(tmp_path / "run"), everything(undisturbed))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "after", "stopped", "position"),
    [(1, 5, 6, {"epoch": 1, "position": 16}), (0, 7, 8, {"epoch": 2, "position": 0})],
    ids=["one rank, in the middle of an epoch", "one rank, in the last step of an epoch"],
)
def test_a_signal_to_one_rank_stops_all_at_the_same_step(
    tmp_path: Path, undisturbed: Path, rank: int, after: int, stopped: int, position: dict[str, int]
) -> None:
    job = tiny(tmp_path / "run", PATIENT)
    with world.start(2, tiny_jobs.is_signalled, job, after, signal.SIGTERM, rank) as stopping:
        assert stopping.wait() == [EXIT_RESTART] * 2
    saved = newest(tmp_path / "run/checkpoints")
    assert saved is not None
    assert saved.name == f"step-{stopped:08d}"
    assert read_info(saved)["data"] == position
    world.run(2, tiny_jobs.trains, job)
    assert_equal_to_the_bit(everything(tmp_path / "run"), everything(undisturbed))


@pytest.mark.slow
@pytest.mark.parametrize("staleness", ["1", "async"])
def test_workers_at_different_steps_stop_after_the_same_one(tmp_path: Path, staleness: str) -> None:
    job = tiny(
        tmp_path / "run",
        MLP,
        strategy=f"server=2,staleness={staleness}",
        train__ema=0.9,
        train__epochs=9,
    )
    with world.start(3, tiny_jobs.is_signalled, job, 5, signal.SIGTERM, 1) as stopping:
        assert stopping.wait() == [EXIT_RESTART] * 3
    saved = newest(tmp_path / "run/checkpoints")
    assert saved is not None
    assert 6 <= int(saved.name.removeprefix("step-")) < 36
    world.run(3, tiny_jobs.trains, job)  # each step of the nine epochs is logged once
    assert json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])["step"] == 36


@pytest.mark.slow
def test_a_signal_in_the_very_last_step_lets_the_run_end(tmp_path: Path, undisturbed: Path) -> None:
    with world.start(2, tiny_jobs.is_signalled, tiny(tmp_path / "run", PATIENT), 11) as ending:
        assert ending.wait() == [0, 0]
    assert_equal_to_the_bit(everything(tmp_path / "run"), everything(undisturbed))


def is_told_to_stop_on_a_full_disk(job: Job) -> None:
    training = tiny_jobs.FillsTheDisk(job, steps=(1,))
    training.run.request_stop()
    tiny_jobs.go(training)


def ends_while_it_draws(job: Job) -> None:
    """Train; while rank 0 draws the curves, rank 1 gets a SIGTERM."""
    file = Path(job.directory).with_name("rank-1")

    def draws(*_: Any) -> None:
        os.kill(int(file.read_text()), signal.SIGTERM)
        time.sleep(0.3)

    training = loop.Training(job)
    if training.run.rank == 1:
        file.write_text(str(os.getpid()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "plot_or_note", draws)
        tiny_jobs.go(training)


def test_a_signal_after_the_last_save_ends_no_rank(tmp_path: Path) -> None:
    with world.start(2, ends_while_it_draws, tiny(tmp_path / "run", MLP)) as ending:
        assert ending.wait() == [0, 0]


def test_a_stop_that_cannot_be_saved_does_not_say_run_me_again(tmp_path: Path) -> None:
    with world.start(
        2, is_told_to_stop_on_a_full_disk, tiny(tmp_path / "run", PATIENT)
    ) as stopping:
        assert stopping.wait() == [1, 1]
    assert "the checkpoint of step 1 was not saved" in stopping.failures[0].text


class CannotMark(tiny_jobs.Undrawn):
    """Finds a directory where `latest` is written first, when it saves one step."""

    def __init__(self, job: Job, step: int) -> None:
        super().__init__(job)
        write = self.checkpoints.write

        def finds_it(division: Division, *what: Any) -> Path:
            if division.step == step and self.run.rank == 0:
                (self.checkpoints.directory / "latest.tmp").mkdir(parents=True)
            return write(division, *what)

        self.checkpoints.write = finds_it  # type: ignore[method-assign]


def cannot_mark(job: Job, step: int) -> None:
    training = CannotMark(job, step)
    if step == 1:
        training.run.request_stop()
    tiny_jobs.go(training)


@pytest.mark.parametrize(
    ("step", "batch_size", "code", "beside"),
    [
        pytest.param(1, 30, EXIT_RESTART, True, marks=pytest.mark.slow),
        pytest.param(1, 8, EXIT_RESTART, False, marks=pytest.mark.slow),
        (1, 8, EXIT_RESTART, True),
        pytest.param(12, 8, 0, False, marks=pytest.mark.slow),
    ],
    ids=["a stop at the end of an epoch", "a stop that waits", "a stop beside", "the end"],
)
def test_a_save_that_could_not_be_marked_is_a_save_all_the_same(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    beside: bool,
    step: int,
    batch_size: int,
    code: int,
) -> None:
    job = tiny(
        tmp_path / "run", MLP, {"checkpoint.asynchronous": beside, "train.batch_size": batch_size}
    )
    with world.start(2, cannot_mark, job, step) as ending:
        assert ending.wait() == [code] * 2
    assert f"step {step} was saved, but not all that follows was done" in capfd.readouterr().err
    (tmp_path / "run/checkpoints/latest.tmp").rmdir()
    world.run(2, tiny_jobs.trains, job)
    found = everything(tmp_path / "run")
    assert found["latest"] == f"{max(found['checkpoints'][2:])}\n"
