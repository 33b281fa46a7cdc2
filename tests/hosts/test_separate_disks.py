"""Runs on hosts that share no disk: namespaces with a disk each, against the undisturbed bits."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny_jobs
from hosts_command import ROOT, until
from namespaces import Host, Hosts, needs_hosts
from tiny_jobs import EVERYTHING, assert_equal_to_the_bit, everything, tiny

from shoal.config import to_yaml
from shoal.testing import world

pytestmark = [pytest.mark.slow, needs_hosts]

RUN = "/mnt/run"  # on every host a directory of its own
LISTED = ["--hosts", "node1,node2"]
VARIABLES = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests/train'}", "SHOAL_HOSTS_LEASE": "3"}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with Hosts(tmp_path_factory.mktemp("hosts"), 3) as hosts:
        yield hosts


@pytest.fixture(autouse=True)
def empty_disks(hosts: Hosts) -> None:
    for node in hosts.nodes:
        hosts.run(node, ["rm", "-rf", RUN]).check_returncode()


def settings(strategy: str) -> dict[str, Any]:
    background = {"checkpoint.asynchronous": strategy == "zero3"}
    return {**EVERYTHING, **background, "strategy": strategy, "train.epochs": 20}


def write_job(hosts: Hosts, strategy: str, out: str | Path = RUN) -> str:
    path = hosts.shared / "job.yaml"
    path.write_text(to_yaml(tiny(Path(out), settings(strategy))))
    return str(path)


def undisturbed(folder: Path, strategy: str) -> dict[str, Any]:
    world.run(2, tiny_jobs.trains, tiny(folder / "alone", settings(strategy)))
    return everything(folder / "alone")


@contextmanager
def training(hosts: Hosts, job: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*hosts.desk.enter(), "sh", "-c", 'cd "$0" && exec "$@"', str(hosts.shared)]
        + [sys.executable, "-m", "shoal", "train", job, *words],
        env=hosts.environment(hosts.desk, **VARIABLES),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def ended(hosts: Hosts, job: str, *words: str) -> tuple[int, str]:
    with training(hosts, job, *words) as process:
        _, stderr = process.communicate(timeout=240)
    return process.returncode, stderr


def left(hosts: Hosts, node: Host) -> dict[str, Any]:
    """Return what a run has left on one host."""
    copy = hosts.shared / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    hosts.run(node, ["cp", "-r", RUN, str(copy)]).check_returncode()
    return everything(copy)


def has_saved(hosts: Hosts, node: Host) -> bool:
    found = hosts.run(node, ["sh", "-c", f"ls {RUN}/checkpoints/step-*/manifest.json"])
    return found.returncode == 0


def lose_disk_and_processes(hosts: Hosts, node: Host) -> None:
    """Let a host start again, with an empty disk."""
    hosts.run(node, ["rm", "-rf", RUN])
    for pid in node.pids() - node.first_pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    hosts.run(node, ["rm", "-rf", RUN]).check_returncode()


def stop_after_a_save(hosts: Hosts, job: str, words: Sequence[str], first: Host) -> None:
    with training(hosts, job, *words) as process:
        until(lambda: process.poll() is not None or has_saved(hosts, first))
        for pid in hosts.desk.pids():
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes()
                if b"-m\0shoal\0" in line and b"nsenter" not in line:
                    os.kill(pid, signal.SIGTERM)
        _, stderr = process.communicate(timeout=120)
        assert process.returncode == 75, stderr


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_run_whose_host_loses_its_disk_ends_bit_equal(
    hosts: Hosts, tmp_path: Path, strategy: str
) -> None:
    expected = undisturbed(tmp_path, strategy)
    job = write_job(hosts, strategy)
    node1, node2, _ = hosts.nodes
    with training(hosts, job, *LISTED) as process:
        until(lambda: process.poll() is not None or has_saved(hosts, node2))
        lose_disk_and_processes(hosts, node2)
        _, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    assert f"the run directory {RUN} of host node1 is not the one of node2" in stderr
    # The first host may still rename the checkpoint when it is asked for its step.
    assert "2 processes start from the " in stderr
    assert "resumed from" in stderr
    assert_equal_to_the_bit(left(hosts, node1), expected)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_run_resumes_on_hosts_in_another_order_after_the_first_lost_its_disk(
    hosts: Hosts, tmp_path: Path, strategy: str
) -> None:
    expected = undisturbed(tmp_path, strategy)
    job = write_job(hosts, strategy)
    node1, node2, _ = hosts.nodes
    stop_after_a_save(hosts, job, LISTED, node1)
    hosts.run(node1, ["rm", "-rf", RUN]).check_returncode()
    code, stderr = ended(hosts, job, "--hosts", "node2,node1")
    assert code == 0, stderr
    assert "resumed from" in stderr
    assert_equal_to_the_bit(left(hosts, node2), expected)


def test_a_run_resumes_on_more_hosts_as_on_a_shared_disk(hosts: Hosts) -> None:
    node1 = hosts.nodes[0]
    stop_after_a_save(hosts, write_job(hosts, "zero3"), LISTED, node1)
    # With the files of both hosts: on a disk that all hosts share.
    shared = hosts.shared / "run"
    shared.mkdir()
    for node in hosts.nodes[:2]:
        copied = hosts.run(node, ["cp", "-r", f"{RUN}/.", str(shared)])
        assert copied.returncode == 0, copied.stderr
    ends = []
    for out in (RUN, shared):
        code, stderr = ended(hosts, write_job(hosts, "zero3", out), "--hosts", "node1,node2,node3")
        assert code == 0, stderr
        assert "resumed from" in stderr
        assert ("is not the one of" in stderr) == (out == RUN)
        ends.append(left(hosts, node1) if out == RUN else everything(shared))
    assert_equal_to_the_bit(*ends)


def test_servers_without_a_shared_disk_are_refused_before_the_start(hosts: Hosts) -> None:
    job = write_job(hosts, "ddp")
    code, stderr = ended(hosts, job, "--strategy", "server=1", *LISTED)
    assert code == 2
    assert "strategy server needs a run directory that all hosts share" in stderr
    assert hosts.leftovers() == {}


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_host_that_starts_again_without_disk_and_memory_resumes_from_a_snapshot(
    hosts: Hosts, tmp_path: Path, strategy: str
) -> None:
    expected = undisturbed(tmp_path, strategy)
    path = Path(write_job(hosts, strategy))
    path.write_text(
        to_yaml(tiny(Path(RUN), settings(strategy), snapshot__every=1, checkpoint__every_steps=20))
    )
    node1, node2, _ = hosts.nodes
    with training(hosts, str(path), *LISTED) as process:
        until(lambda: process.poll() is not None or has_saved(hosts, node2))
        lose_disk_and_processes(hosts, node2)
        hosts.run(node2, ["sh", "-c", "rm -rf /dev/shm/*"]).check_returncode()
        _, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    assert "resumed from" in stderr
    assert left(hosts, node1)["tensors"].keys() == expected["tensors"].keys()
    assert tiny_jobs.differing(left(hosts, node1)["tensors"], expected["tensors"]) == []
    assert hosts.run(node2, ["ls", "/dev/shm"]).stdout.strip() == ""
    assert hosts.leftovers() == {}


def test_a_run_goes_on_without_a_host_that_is_gone_with_its_disk(tmp_path: Path) -> None:
    words = ["--hosts", "node1,node2,node3", "--min-hosts", "2"]
    with Hosts(tmp_path, 3) as hosts:
        node1, node2, node3 = hosts.nodes
        with training(hosts, write_job(hosts, "zero3"), *words) as process:
            until(lambda: process.poll() is not None or has_saved(hosts, node2))
            hosts.lose(node3)
            _, stderr = process.communicate(timeout=300)
        assert process.returncode == 0, stderr
        assert "the run goes on without node3" in stderr
        assert "2 processes start from the checkpoint of step" in stderr
        assert left(hosts, node1)["info"]["step"] == 78
