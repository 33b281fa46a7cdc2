"""`shoal train --hosts`: real ranks of real agents, with losses, against the undisturbed bits."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import tiny_jobs
from hosts_command import ROOT, hosts_command, kill
from test_servers_on_hosts import has_saved
from tiny_jobs import MLP, assert_equal_to_the_bit, everything, tiny

from shoal.config import to_yaml
from shoal.testing import world
from tests.harness.waiting import until

pytestmark = pytest.mark.slow

TRAIN_TESTS = ROOT / "tests/train"
MORTAL = {
    **MLP,
    "plugin": str(TRAIN_TESTS / "crashing_data.py"),
    "data.name": "mortal",
    "checkpoint.every_epochs": 2,
}
VARIABLES = {"PYTHONPATH": f"{ROOT}:{TRAIN_TESTS}", "SHOAL_HOSTS_LEASE": "3"}
SLEEPY = {
    "plugin": str(Path(__file__).with_name("sleeping_data.py")),
    "data.name": "sleepy",
    "train.hang_limit_s": 2.0,
}
LOST = "rank 1 of 2 on b is lost: the host does not answer any more"


def write_job(folder: Path, strategy: str, **more: Any) -> Path:
    job = tiny(folder / "run", MORTAL, strategy=strategy, data__path=str(folder), **more)
    path = folder / "job.yaml"
    path.write_text(to_yaml(job))
    return path


def undisturbed(folder: Path, strategy: str, **more: Any) -> dict[str, Any]:
    folder.mkdir()
    job = tiny(folder / "run", MORTAL, strategy=strategy, data__path=str(folder), **more)
    world.run(2, tiny_jobs.trains, job)
    return everything(folder / "run")


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_run_that_loses_a_rank_ends_bit_equal(tmp_path: Path, strategy: str) -> None:
    expected = undisturbed(tmp_path / "alone", strategy)
    job = write_job(tmp_path, strategy)
    (tmp_path / "fate.1").write_text(json.dumps({"part": "training", "point": 400}))
    with hosts_command(tmp_path, "train", str(job), "--hosts", "a,b", **VARIABLES) as command:
        code, _, stderr = command.end()
    assert code == 0, stderr
    assert (tmp_path / "met.1").exists()
    assert "note: rank 1 of 2 on b was killed by SIGKILL (out of memory?); 2 processes" in stderr
    assert "Traceback" not in stderr
    assert_equal_to_the_bit(everything(tmp_path / "run"), expected)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_run_whose_host_is_lost_and_comes_back_ends_bit_equal(
    tmp_path: Path, number: int
) -> None:
    expected = undisturbed(tmp_path / "alone", "ddp", train__epochs=40)
    job = write_job(tmp_path, "ddp", train__epochs=40)
    with hosts_command(tmp_path, "train", str(job), "--hosts", "a,b", **VARIABLES) as command:
        until(lambda: has_saved(tmp_path, command))
        agent = command.agent("b")
        os.kill(agent, number)
        code, _, stderr = command.end()
        kill([agent])
    assert code == 0, stderr
    assert LOST in stderr
    assert "2 processes start from the checkpoint of step" in stderr
    assert_equal_to_the_bit(everything(tmp_path / "run"), expected)


def test_a_run_goes_on_without_a_host_where_that_is_allowed(tmp_path: Path) -> None:
    job = write_job(tmp_path, "ddp", train__epochs=40)
    words = ["train", str(job), "--hosts", "a,b", "--min-hosts", "1"]
    with hosts_command(tmp_path, *words, FAKE_SSH_DOWN=str(tmp_path), **VARIABLES) as command:
        until(lambda: has_saved(tmp_path, command))
        (tmp_path / "b").touch()
        kill([command.agent("b")])
        code, _, stderr = command.end()
    assert code == 0, stderr
    assert LOST in stderr
    assert "note: host b: ssh says: ssh: connect to host b port 22: No route to host" in stderr
    assert "note: the run goes on without b" in stderr
    assert "1 process starts from the checkpoint of step" in stderr


def test_a_run_that_is_asked_to_stop_saves_and_the_same_command_resumes_it(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path / "alone", "ddp", train__epochs=40)
    job = write_job(tmp_path, "ddp", train__epochs=40)
    words = ["train", str(job), "--hosts", "a,b"]
    with hosts_command(tmp_path, *words, **VARIABLES) as command:
        until(lambda: has_saved(tmp_path, command))
        command.signal(signal.SIGTERM)
        code, _, stderr = command.end()
        assert code == 75, stderr
        assert command.others() == []
    with hosts_command(tmp_path, *words, **VARIABLES) as command:
        assert command.end()[0] == 0
    assert_equal_to_the_bit(everything(tmp_path / "run"), expected)


def test_a_rank_that_hangs_is_named_with_its_host_and_the_run_ends_bit_equal(
    tmp_path: Path,
) -> None:
    settings = {name.replace(".", "__"): value for name, value in SLEEPY.items()}
    expected = undisturbed(tmp_path / "alone", "ddp", **settings)
    job = write_job(tmp_path, "ddp", **settings)
    (tmp_path / "sleeps.1").write_text("5")
    with hosts_command(tmp_path, "train", str(job), "--hosts", "a,b", **VARIABLES) as command:
        code, _, stderr = command.end()
    assert code == 0, stderr
    assert (tmp_path / "slept.1").exists()
    assert stderr.count("rank 1 of 2 on b did not come: it is in the forward pass, while") == 2
    assert "in sleeps_in_its_step" in stderr
    assert "is lost" not in stderr
    assert_equal_to_the_bit(everything(tmp_path / "run"), expected)
