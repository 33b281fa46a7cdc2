"""`shoal train` on real hosts of which two lose each other, while the command reaches both."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tiny_jobs
from host_files import REPOSITORY
from hosts_command import until
from namespaces import Host, Hosts, needs_hosts
from test_real_runs import TRAIN_TESTS, shoal
from tiny_jobs import assert_equal_to_the_bit, everything

from shoal.config import to_yaml
from shoal.testing import world

pytestmark = [pytest.mark.slow, needs_hosts]

PARTED_S = 12.0
LONG = {
    "train.epochs": 150,
    "train.hang_limit_s": 3.0,
    "checkpoint.every_steps": 40,
    "evaluation.every": 100,
    "log.every": 400,
}
MODULES = f"{REPOSITORY}:{TRAIN_TESTS}"


@contextmanager
def lost_packets(hosts: Hosts, *parted: Host) -> Iterator[None]:
    """Let the switch lose what these hosts send to each other, without a word."""
    hosts.part(*parted)
    yield
    hosts.rejoin(*parted)


@contextmanager
def no_route(hosts: Hosts, first: Host, second: Host) -> Iterator[None]:
    """Let each of two hosts refuse at once to send to the other."""
    routes = [(first, second.address), (second, first.address)]
    for change in ("add", "del"):
        for host, address in routes:
            words = ["ip", "route", change, "blackhole", address]
            subprocess.run([*host.enter("--net"), *words], check=True)
        if change == "add":
            yield


def write_job(hosts: Hosts) -> list[str]:
    """Write the experiment, and return the words of its command."""
    job = tiny_jobs.tiny(hosts.shared / "run", tiny_jobs.MLP, LONG)
    (hosts.shared / "job.yaml").write_text(to_yaml(job))
    return ["train", "job.yaml", "--hosts", "node1,node2,node3", "--env", "PYTHONPATH"]


@pytest.mark.parametrize("parted", [lost_packets, no_route])
def test_a_run_waits_for_hosts_that_lose_each_other_and_ends_bit_equal(
    tmp_path: Path, parted
) -> None:
    alone = tmp_path / "alone"
    world.run(3, tiny_jobs.trains, tiny_jobs.tiny(alone, tiny_jobs.MLP, LONG))
    with Hosts(tmp_path / "hosts", 3) as hosts:
        run = hosts.shared / "run"
        with shoal(hosts, *write_job(hosts), PYTHONPATH=MODULES) as process:
            until(lambda: any((run / "checkpoints").glob("step-*/manifest.json")))
            with parted(hosts, *hosts.nodes[1:]):
                time.sleep(PARTED_S)
            _, stderr = process.communicate(timeout=90)
        assert process.returncode == 0, stderr
        assert "note: node3 and node2 cannot reach each other (10.77.0.102: " in stderr
        assert "3 processes start from the checkpoint of step" in stderr
        assert "is lost" not in stderr
        assert_equal_to_the_bit(everything(run), everything(alone))
        assert hosts.leftovers() == {}


def test_a_run_waits_for_hosts_that_do_not_reach_each_other_when_it_starts(tmp_path: Path) -> None:
    with Hosts(tmp_path / "hosts", 3) as hosts:
        with shoal(hosts, *write_job(hosts), PYTHONPATH=MODULES) as process:
            with no_route(hosts, *hosts.nodes[1:]):
                time.sleep(PARTED_S)
            _, stderr = process.communicate(timeout=90)
        assert process.returncode == 0, stderr
        assert "note: node3 and node2 cannot reach each other (10.77.0.102: " in stderr
        assert "3 processes start from the beginning, for there is no checkpoint" in stderr
        assert hosts.leftovers() == {}
