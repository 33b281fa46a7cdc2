"""A directory holds one experiment, and one process group that trains it."""

import os
import re
import signal
from pathlib import Path
from socket import gethostname

import pytest
import tiny_jobs
from tiny_jobs import MLP, WORKERS, contents, everything, tiny

from shoal.config.job import Job
from shoal.errors import ConfigError
from shoal.testing import world
from shoal.train.loop import train
from shoal.train.run_directory import check_usable, lock, probe_in
from tests.harness.waiting import until


def closing_table(said: str) -> list[str]:
    """Its lines, but for the time."""
    lines = said[said.index("final validation") :].splitlines()
    return [line for line in lines if not line.startswith("time")]


@pytest.mark.slow
def test_a_finished_run_shows_its_results_again_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tiny(tmp_path / "run", MLP)
    train(job)
    before, table = contents(tmp_path / "run"), closing_table(capsys.readouterr().out)
    train(job)
    said = capsys.readouterr()
    assert contents(tmp_path / "run") == before
    assert closing_table(said.out) == table
    assert len(table) == 6
    assert f"resumed from {tmp_path / 'run/checkpoints/step-00000012'}" in said.err
    assert "all 12 steps were trained before, with the settings of then: --out DIR" in said.err


def test_another_experiment_in_a_directory_is_refused_with_its_differences(
    tmp_path: Path,
) -> None:
    tiny_jobs.trains(tiny(tmp_path / "run", MLP))
    before = contents(tmp_path / "run")
    with pytest.raises(
        ConfigError, match=r"run holds another experiment: optimizer\.lr: 0\.1 there, 0\.2 here"
    ):
        tiny_jobs.trains(tiny(tmp_path / "run", MLP, optimizer__lr=0.2))
    assert contents(tmp_path / "run") == before


def test_two_runs_at_once_in_one_directory_are_refused(tmp_path: Path) -> None:
    job = tiny(tmp_path / "run", MLP, data__name="patient", data__path=str(tmp_path))
    with world.start(1, tiny_jobs.trains, job) as first:
        until(lambda: list(tmp_path.glob("waiting.*")))
        with pytest.raises(
            ConfigError, match=rf"process {first.pids[0]} on {re.escape(gethostname())}\. Wait"
        ):
            tiny_jobs.trains(job)
        first.kill(0, signal.SIGTERM)
        assert first.wait() == [75]
    tiny_jobs.trains(job)
    assert everything(tmp_path / "run")["latest"] == "step-00000012\n"


def claims_and_leaves_a_worker(job: Job, end: Path) -> None:
    claim = lock(job)
    if os.fork() == 0:
        os.setsid()  # out of reach of the launcher, which would end it
        until(end.exists)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
    claim.close()


def test_a_killed_process_leaves_no_lock_even_where_its_workers_live_on(tmp_path: Path) -> None:
    job = tiny(tmp_path / "run", MLP, WORKERS)
    try:
        with world.start(1, claims_and_leaves_a_worker, job, tmp_path / "end") as dying:
            assert dying.wait() == [-signal.SIGKILL]
        lock(job).close()
    finally:
        (tmp_path / "end").touch()


def test_a_file_by_which_hosts_look_for_each_other_is_not_foreign(tmp_path: Path) -> None:
    job = tiny(tmp_path, MLP)
    with probe_in(str(tmp_path)):
        check_usable(job)
        (tmp_path / "thesis.txt").touch()
        with pytest.raises(ConfigError, match=r"holds files \(thesis.txt\)"):
            check_usable(job)
