"""`shoal scale` of a run on several hosts: ranks fill the hosts in the order of their list."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import tiny_jobs
from hosts_command import ROOT, HostsCommand, hosts_command
from tiny_jobs import MLP, metrics, tiny

from shoal.config import to_yaml
from shoal.launch.control_channel import NAME
from tests.harness.waiting import until

pytestmark = pytest.mark.slow

TRAIN_TESTS = ROOT / "tests/train"
DOUBLE = {**MLP, "train.precision": "fp64", "checkpoint.every_steps": 5}


def scale(folder: Path, processes: int) -> tuple[int, str]:
    command = [sys.executable, "-m", "shoal", "scale", str(folder / "run"), str(processes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    return done.returncode, done.stdout + done.stderr


def assert_goes_on(folder: Path, before: int, after: int) -> None:
    code, answer = scale(folder, after)
    assert code == 0, answer
    assert f"{before} processes stop and save\n" in answer
    assert f"{after} go on, from the checkpoint of step" in answer


def can_be_called(folder: Path, command: HostsCommand, waiting: int) -> bool:
    assert command.process.poll() is None, command.end()
    has_waited = len(list(folder.glob("waiting.*"))) >= waiting
    return has_waited and (folder / "run" / NAME).exists()


@pytest.mark.parametrize("more", [[], ["--server-hosts", "s,t", "--strategy", "server=2"]])
def test_a_run_has_fewer_and_more_ranks_with_the_losses_of_one_rank(
    tmp_path: Path, more: list[str]
) -> None:
    tiny_jobs.trains(tiny(tmp_path / "alone", DOUBLE))
    job = tiny(tmp_path / "run", DOUBLE, data__name="seen", data__path=str(tmp_path))
    (tmp_path / "job.yaml").write_text(to_yaml(job))
    words = ["train", str(tmp_path / "job.yaml"), "--hosts", "a:1,b:2", *more]
    path = f"{ROOT}:{TRAIN_TESTS}"
    with hosts_command(tmp_path, *words, PYTHONPATH=path) as command:
        until(lambda: can_be_called(tmp_path, command, 1))
        code, answer = scale(tmp_path, 4)
        assert (code, "4 processes were asked for" in answer) == (2, True)
        assert "its hosts have room for 3 (a:1, b:2). Start it again with a longer" in answer
        # The ranks that go on wait in the middle too, however long the next command takes to start.
        (tmp_path / "again").touch()
        assert_goes_on(tmp_path, 3, 1)
        until(lambda: can_be_called(tmp_path, command, 2))
        (tmp_path / "again").unlink()
        assert_goes_on(tmp_path, 1, 2)
        code, stdout, stderr = command.end()
        assert command.others() == []
    assert code == 0, stderr
    assert "= 2 ranks" in stdout
    found, expected = metrics(tmp_path / "run"), metrics(tmp_path / "alone")
    losses = [record.pop("loss") for record in expected]
    assert [record.pop("loss") for record in found] == pytest.approx(losses, rel=1e-10)
