"""Whole runs over OpenSSH on real hosts: namespaces with an ssh server each."""

from __future__ import annotations

import json
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import tiny_jobs
from desk_command import DeskCommand, ended
from host_files import REPOSITORY
from namespaces import Hosts, needs_hosts

from shoal.config import to_yaml
from tests.harness.waiting import until

pytestmark = [pytest.mark.slow, needs_hosts]

TRAIN_TESTS = REPOSITORY / "tests/train"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with Hosts(tmp_path_factory.mktemp("hosts"), 2) as hosts:
        yield hosts


def test_servers_are_listed_and_added_from_the_machine_of_the_command(hosts: Hosts) -> None:
    folder = hosts.shared / "long"
    job = tiny_jobs.tiny(folder, tiny_jobs.MLP, strategy="server=2", train__epochs=100_000)
    (hosts.shared / "long.yaml").write_text(to_yaml(job))
    with DeskCommand(hosts, "train", "long.yaml", "--hosts", "node1:2,node2:2") as command:
        process = command.process
        until(lambda: (folder / "servers.json").exists() or process.poll() is not None)
        code, listed, stderr = ended(hosts, "servers", "long", "--json")
        assert code == 0, stderr
        assert {server["shard"] for server in json.loads(listed)["result"]} == {0, 1}
        code, listed, stderr = ended(hosts, "servers", "long", "add", "--json")
        assert code == 0, stderr
        assert {server["shard"] for server in json.loads(listed)["result"]} == {0, 1, 2}
        command.signal(signal.SIGTERM)
        code, _, stderr = command.end()
    assert code == 75, stderr
    assert not (folder / "servers.json").exists()
    code, _, stderr = ended(hosts, "servers", "long")
    assert (code, "no servers run for it here" in stderr) == (2, True), stderr
    assert hosts.leftovers() == {}


def test_a_script_has_servers_on_hosts_that_share_no_directory_for_their_key(hosts: Hosts) -> None:
    shutil.copy(Path(__file__).with_name("served_script.py"), hosts.shared / "served.py")
    words = ["launch", "--hosts", "node1:2,node2", "--env", "TMPDIR=/mnt"]
    words += ["--env", "STRATEGY=server=2,replicas=2", "served.py"]
    code, stdout, stderr = ended(hosts, *words)
    assert (code, stdout) == (0, "is the model of one process\n"), stderr
    assert hosts.leftovers() == {}


@pytest.mark.parametrize("network", ["one", "v6"])
def test_servers_run_on_hosts_of_their_own_and_nowhere_else(tmp_path: Path, network: Any) -> None:
    with Hosts(tmp_path, 4, network=network) as hosts:
        folder = hosts.shared / "long"
        job = tiny_jobs.tiny(folder, tiny_jobs.MLP, train__epochs=100_000)
        (hosts.shared / "long.yaml").write_text(to_yaml(job))
        words = ["--hosts", "node1,node2", "--server-hosts", "node3,node4"]
        words += ["--strategy", "server=3,replicas=2", "--restarts", "0"]
        with DeskCommand(hosts, "train", "long.yaml", *words, SHOAL_HOSTS_LEASE="3") as command:
            process = command.process
            until(lambda: places(hosts) == [("node3", 3), ("node4", 3)] or process.poll())
            assert process.poll() is None, process.communicate()
            code, _, stderr = ended(hosts, "servers", "long", "add")
            assert code == 0, stderr
            assert places(hosts) == [("node3", 4), ("node4", 4)]
            hosts.cut(hosts.nodes[2])
            until(lambda: "the run goes on if replicas hold" in next_line(process.stderr))
            until(lambda: places(hosts) == [("node4", 4)])
            command.signal(signal.SIGTERM)
            code, _, stderr = command.end()
        assert code == 75, stderr
        # The ssh server of a host without its link notices that after many minutes.
        left = [line for lines in hosts.leftovers().values() for line in lines]
        assert [line for line in left if not line.startswith("sshd")] == []


def places(hosts: Hosts) -> list[tuple[str, int]]:
    """Return how many servers of the run `long` each host has."""
    code, listed, _ = ended(hosts, "servers", "long", "--json")
    found = json.loads(listed)["result"] if code == 0 else []
    return sorted(Counter(server.get("host", "?") for server in found).items())


def next_line(stream: IO[str] | None) -> str:
    assert stream is not None
    return stream.readline()


def test_hosts_with_only_ipv6_train_with_ddp_and_with_servers(tmp_path: Path) -> None:
    with Hosts(tmp_path, 2, network="v6", names="none") as hosts:
        for strategy in ("ddp", "server=2", "server=2,replicas=2"):
            folder = hosts.shared / strategy
            job = tiny_jobs.tiny(folder, tiny_jobs.MLP, strategy=strategy)
            (hosts.shared / "job.yaml").write_text(to_yaml(job))
            words = ["train", str(hosts.shared / "job.yaml"), "--hosts", "node1:2,node2:2"]
            code, _, stderr = ended(hosts, *words)
            assert code == 0, f"{strategy}: {stderr}"
            assert tiny_jobs.metrics(folder)[-1]["step"] == 12
            assert hosts.leftovers() == {}
