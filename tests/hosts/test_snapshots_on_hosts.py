"""Snapshots over hosts: one that is lost with its memory is resumed from the copies on another."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_jobs
from hosts_command import ROOT, HostsCommand, hosts_command, kill, until
from tiny_jobs import EVERYTHING, assert_equal_to_the_bit, everything, metrics, tiny

from shoal.config import to_yaml
from shoal.testing import world

pytestmark = pytest.mark.slow

TRAIN_TESTS = ROOT / "tests/train"
VARIABLES = {"PYTHONPATH": f"{ROOT}:{TRAIN_TESTS}", "SHOAL_HOSTS_LEASE": "3"}
# Nothing is on a disk before the end of the run.
SETTINGS = {
    **EVERYTHING,
    "train.epochs": 15,
    "log.every": 1,
    "evaluation.every": 15,
    "checkpoint.every_epochs": 15,
    "checkpoint.every_steps": None,
}
RESUMED = re.compile(r"resumed from the snapshot of step (\d+), in memory")


def write_job(folder: Path, strategy: str, **more: Any) -> str:
    path = folder / "job.yaml"
    job = tiny(folder / "run", SETTINGS, strategy=strategy, snapshot__every=1, **more)
    path.write_text(to_yaml(job))
    return str(path)


def undisturbed(folder: Path, strategy: str) -> dict[str, Any]:
    world.run(2, tiny_jobs.trains, tiny(folder / "alone", SETTINGS, strategy=strategy))
    return everything(folder / "alone")


def logged_step(folder: Path) -> int:
    """Return the newest step of the log; the snapshot of the step before it is whole."""
    if not (folder / "run/metrics.jsonl").exists():
        return 0
    return max((record["step"] for record in metrics(folder / "run")), default=0)


def has_trained(folder: Path, command: HostsCommand, steps: int) -> Callable[[], bool]:
    def has() -> bool:
        assert command.process.poll() is None
        return logged_step(folder) >= steps

    return has


def resumed_step(stderr: str) -> int:
    found = RESUMED.search(stderr)
    assert found is not None, stderr
    return int(found[1])


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize("lost", ["a", "b"])
def test_a_host_that_is_lost_with_its_memory_costs_the_steps_since_the_last_snapshot(
    tmp_path: Path, strategy: str, lost: str
) -> None:
    expected = undisturbed(tmp_path, strategy)
    words = ["train", write_job(tmp_path, strategy), "--hosts", "a,b"]
    with hosts_command(tmp_path, *words, **VARIABLES) as command:
        until(has_trained(tmp_path, command, 5))
        kill([command.agent(lost)])
        step = logged_step(tmp_path)
        code, stdout, stderr = command.end()
        assert command.others() == []
    assert code == 0, stderr
    assert "snapshots every 1 steps, in the memory of each rank's host and of 1 other" in stdout
    assert f"on {lost} is lost: the host does not answer any more" in stderr
    assert resumed_step(stderr) >= step - 1
    assert_equal_to_the_bit(everything(tmp_path / "run"), expected)


def test_a_run_goes_on_on_fewer_hosts_from_the_copies(tmp_path: Path) -> None:
    words = ["train", write_job(tmp_path, "zero3"), "--hosts", "a,b", "--min-hosts", "1"]
    with hosts_command(tmp_path, *words, FAKE_SSH_DOWN=str(tmp_path), **VARIABLES) as command:
        until(has_trained(tmp_path, command, 5))
        (tmp_path / "b").touch()
        kill([command.agent("b")])
        step = logged_step(tmp_path)
        code, _, stderr = command.end()
    assert code == 0, stderr
    assert "note: the run goes on without b" in stderr
    assert resumed_step(stderr) >= step - 1
    assert everything(tmp_path / "run")["info"]["step"] == max(
        record["step"] for record in metrics(tmp_path / "run")
    )


def test_without_copies_a_lost_host_takes_its_part_with_it(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path, "zero3")
    words = ["train", write_job(tmp_path, "zero3", snapshot__copies=0), "--hosts", "a,b"]
    with hosts_command(tmp_path, *words, **VARIABLES) as command:
        until(has_trained(tmp_path, command, 5))
        kill([command.agent("b")])
        code, _, stderr = command.end()
    assert code == 0, stderr
    assert "is skipped: no host has a good __1_0.distcp" in stderr
    assert "resumed from" not in stderr
    assert_equal_to_the_bit(everything(tmp_path / "run"), expected)
