"""Starts over ssh, checks and addresses on real hosts: namespaces with an ssh server each."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_clients import AgentClient, agents, block, chosen_address, stand_in
from namespaces import SHELLS, Hosts, needs_hosts

from shoal.errors import LaunchError

pytestmark = [pytest.mark.slow, needs_hosts]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory) -> Iterator[Hosts]:
    """Two nodes in one network, left by each test as they were."""
    with Hosts(tmp_path_factory.mktemp("hosts"), 2) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def python(hosts: Hosts) -> str:
    return stand_in(hosts.folder)


def own_hosts(tmp_path: Path, *arguments, **more) -> tuple[Hosts, str]:
    """Return hosts of another kind than those of the module, for one test."""
    hosts = Hosts(tmp_path, *arguments, **more)
    return hosts, stand_in(hosts.folder)


@pytest.mark.parametrize("shell", SHELLS)
def test_an_agent_starts_under_every_login_shell(hosts: Hosts, python: str, shell: str):
    with agents(hosts, python, [f"{shell}@node1"]) as (client,):
        environment = client.ask("environment")
    assert environment["cwd"] == "/"
    assert environment["text"] == "ü"
    assert environment["HOME"] == f"/mnt/home/{shell}"
    assert hosts.leftovers() == {}


def test_a_start_up_file_that_waits_for_input_is_told(hosts: Hosts, python: str):
    hosts.write(hosts.nodes[0], ".bashrc", "echo 'Press enter'; read eaten\n")
    with AgentClient(hosts, python, "node1") as client:
        time.sleep(2.0)
        assert client.process.poll() is None
        client.noise = ["Press enter"]
        assert "it printed: Press enter. A start-up file of the login shell" in client.failure()
    hosts.run(hosts.nodes[0], ["rm", "/mnt/home/bash/.bashrc"])
    assert hosts.leftovers() == {}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("echo 'This account is closed'; exit 0\n", "it printed: This account is closed. Log in"),
        ("exit 3\n", "without starting the agent: it ended with exit code 3"),
    ],
)
def test_a_login_shell_that_ends_is_told(hosts: Hosts, python: str, text: str, told: str):
    hosts.write(hosts.nodes[0], ".bashrc", text)
    with AgentClient(hosts, python, "node1") as client:
        assert not client.starts()
        assert told in client.failure()
    hosts.run(hosts.nodes[0], ["rm", "/mnt/home/bash/.bashrc"])


@pytest.mark.parametrize("shell", SHELLS)
def test_an_interpreter_that_is_not_there_is_told(hosts: Hosts, shell: str):
    with AgentClient(hosts, "/opt/absent/python", f"{shell}@node1") as client:
        assert not client.starts()
        assert "no /opt/absent/python there. Give --python" in client.failure()


def test_an_interpreter_without_shoal_is_told(hosts: Hosts):
    program = hosts.folder / "bare"
    program.write_text(f'#!/bin/sh\nunset PYTHONPATH\nexec {sys.executable} -I -S "$@"\n')
    program.chmod(0o755)
    with AgentClient(hosts, str(program), "node1") as client:
        assert not client.starts()
        assert client.failure() == (
            f"host node1: {program} there has no Shoal. Install it there, or give --python"
        )


def test_a_connection_that_the_user_shares_is_used_and_left_as_found():
    # A name of a socket has 108 bytes at most, with the 17 that ssh appends: tmp_path is too long
    # where several test processes run.
    short = tempfile.TemporaryDirectory(prefix="m")
    shared = f"Host node1\n  ControlPath {short.name}/h/m\n"
    hosts, python = own_hosts(Path(short.name, "h"), 1, ssh_config=shared)
    with short, hosts:
        open_master = [*hosts.ssh, "-M", "-N", "-f", "node1"]
        subprocess.run(
            [*hosts.desk.enter(), *open_master],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        hosts.desk.first_pids = hosts.desk.pids()
        hosts.nodes[0].first_pids = hosts.nodes[0].pids()
        # With another key nobody gets in by a connection of one's own.
        (hosts.folder / "user").rename(hosts.folder / "user.away")
        with agents(hosts, python, ["node1"]) as (client,):
            assert client.ask("environment")["cwd"] == "/"
        checked = hosts.run(hosts.desk, [*hosts.ssh, "-O", "check", "node1"])
        assert "Master running" in checked.stderr
        assert hosts.leftovers() == {}


def test_what_ssh_says_is_told_with_a_cure(tmp_path: Path):
    wrong = "Host wrong\n  HostName 10.77.0.101\n  Port 23\nHost eve\n  HostName 10.77.0.101\n"
    hosts, python = own_hosts(tmp_path / "hosts", 2, ssh_config=wrong)
    with hosts:
        known = (hosts.folder / "known_hosts").read_text().splitlines()
        (hosts.folder / "known_hosts").write_text(known[1] + "\n")
        hosts.cut(hosts.nodes[1])
        told = {}
        for destination in ("node2", "absent", "wrong", "stranger@node1"):
            with AgentClient(hosts, python, destination) as client:
                assert not client.starts()
                told[destination] = client.failure()
        hosts.heal(hosts.nodes[1])
        with AgentClient(hosts, python, "node2") as client:
            assert not client.starts()
            told["unknown key"] = client.failure()
        assert hosts.leftovers() == {}
    assert ". Is the host up, and" in told["node2"]
    assert "Could not resolve hostname absent" in told["absent"]
    assert "Is the name right?" in told["absent"]
    assert "Connection refused. Is an ssh server running" in told["wrong"]
    assert "Permission denied" in told["stranger@node1"]
    assert told["stranger@node1"].endswith("Log in once by hand: ssh stranger@node1")
    assert "Host key verification failed. Log in once by hand" in told["unknown key"]


def test_clients_that_the_server_dropped_for_their_number_are_told_of_its_limit(tmp_path: Path):
    hosts, python = own_hosts(tmp_path / "hosts", 1, startups="3:100:3")
    with hosts:
        clients = [AgentClient(hosts, python, "node1") for _ in range(12)]
        started = [client.starts() for client in clients]
        dropped = [client for client, came in zip(clients, started, strict=True) if not came]
        for client in clients:
            client.__exit__()
        assert 0 < len(dropped) < 12
        for client in dropped:
            assert "MaxStartups" in client.failure()
        with agents(hosts, python, ["node1"]):
            pass


@pytest.mark.parametrize(
    ("network", "names", "chosen"),
    [
        ("one", "all", "10.77.0.101"),
        ("one", "debian", "10.77.0.101"),
        ("one", "none", "10.77.0.101"),
        ("two", "debian", "10.78.0.101"),
        ("v6", "debian", "fd77::101"),
        ("v6", "none", "fd77::101"),
    ],
)
def test_the_address_that_all_hosts_reach_is_found(tmp_path: Path, network, names, chosen):
    hosts, python = own_hosts(tmp_path / "hosts", 3, network=network, names=names)
    with hosts, agents(hosts, python, ["node1", "node2", "node3"]) as clients:
        assert chosen_address(clients) == chosen


def test_hosts_that_cannot_reach_the_first_one_are_named(tmp_path: Path):
    hosts, python = own_hosts(tmp_path / "hosts", 3)
    with hosts, agents(hosts, python, ["node1", "node2", "node3"]) as clients:
        block(hosts, hosts.nodes[0], "10.77.0.102")
        with pytest.raises(LaunchError, match=r"node2 cannot reach node1 \(10.77.0.101: timed out"):
            chosen_address(clients)


def test_hosts_end_with_the_process_that_made_them(tmp_path: Path):
    """The harness itself: nothing of it is left after a SIGKILL."""
    program = (
        "import pathlib, sys\n"
        "from namespaces import Hosts\n"
        "hosts = Hosts(pathlib.Path(sys.argv[1]), 2)\n"
        "child = hosts.start(hosts.nodes[0], ['sleep', '1000'])\n"
        "print(*(keeper.pid for keeper in hosts._keepers), child.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "hosts")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={
            "PYTHONPATH": f"{Path(__file__).parent}:{Path(__file__).parents[2]}",
            "PATH": "/usr/bin:/bin",
        },
    ) as maker:
        assert maker.stdout
        pids = maker.stdout.readline().split()
        assert len(pids) == 5
        maker.kill()
    end_s = time.monotonic() + 10
    while any(Path("/proc", pid).exists() for pid in pids):
        assert time.monotonic() < end_s
        time.sleep(0.05)
