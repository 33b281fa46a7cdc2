"""`--server-hosts`: parameter servers on hosts without ranks, which are made of this machine."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hosts_command import HostsCommand, hosts_command, kill
from test_servers_on_hosts import VARIABLES, has_saved, write_job

from shoal.cli.program import main
from shoal.errors import UsageError
from shoal.launch.failure import Failure
from shoal.launch.hosts.driver_session import HostEvent
from shoal.launch.hosts.host_facts import FactsRequest, HostFacts, problems
from shoal.launch.hosts.remote_ranks import HostRanks, RemoteRanks
from shoal.launch.hosts.ssh_client import SshHost, parse_hosts
from shoal.parameter_server.coordinator.admin_client import send_command
from tests.harness.waiting import until

FACTS = HostFacts("1", "s", "3.11.0", "2.13.0", "name", "same", True, True, "d", (), None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(Path(__file__).with_name("served_script.py"), tmp_path / "served.py")
    return tmp_path


@contextmanager
def waiting(folder: Path, hosts: str, strategy: str) -> Iterator[HostsCommand]:
    """Run the script on servers s and t; it has taken two steps of three when this yields."""
    (folder / "wait").touch()
    words = ["launch", "--hosts", hosts, "--server-hosts", "s,t", "--strategy", strategy]
    with hosts_command(folder, *words, "served.py") as command:
        until(lambda: (folder / "secret").exists() or command.process.poll() is not None)
        yield command


@pytest.mark.parametrize(
    ("hosts", "strategy"),
    [
        pytest.param("a,b", "server=2", marks=pytest.mark.slow),
        pytest.param("a", "server=2", marks=pytest.mark.slow),
        pytest.param("a:2", "server=3,replicas=2", marks=pytest.mark.slow),
        pytest.param("a,b", "server=2,encrypt=false", marks=pytest.mark.slow),
    ],
)
def test_servers_of_their_own_serve_any_ranks(folder: Path, hosts: str, strategy: str) -> None:
    words = ["--hosts", hosts, "--server-hosts", "s,t", "--strategy", strategy, "served.py"]
    with hosts_command(folder, "launch", *words) as command:
        code, stdout, stderr = command.end()
        assert command.others() == []
    assert (code, stdout) == (0, "is the model of one process\n"), stderr


@pytest.mark.slow
def test_a_run_with_replicas_goes_on_without_a_host_of_servers(folder: Path) -> None:
    with waiting(folder, "a:2", "server=2,replicas=2") as command:
        kill([command.agent("s")])
        (folder / "wait").unlink()
        code, stdout, stderr = command.end()
        assert command.others() == []
    assert (code, stdout) == (0, "is the model of one process\n"), stderr
    assert "note: the process of the servers on s is lost: the host does not" in stderr
    assert "; the run goes on if replicas hold what it held\n" in stderr


@pytest.mark.slow
def test_a_run_without_replicas_ends_and_names_the_host_of_servers(folder: Path) -> None:
    with waiting(folder, "a,b", "server=2") as command:
        kill([command.agent("s")])
        (folder / "wait").unlink()
        code, _, stderr = command.end()
        assert command.others() == []
    assert code == 1, stderr
    assert "note: the process of the servers on s is lost: the host does not answer" in stderr
    assert "with replicas=2 a run survives the loss of a server" in stderr.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_servers_end_with_the_command(folder: Path, number: int, code: int) -> None:
    with waiting(folder, "a,b", "server=2") as command:
        command.signal(number)
        assert command.end()[0] == code
        until(lambda: command.others() == [], 10)


@pytest.mark.slow
def test_servers_end_when_a_rank_fails(folder: Path) -> None:
    script = (folder / "served.py").read_text()
    assert "wait_for_test(run)\n" in script
    (folder / "served.py").write_text(script.replace("wait_for_test(run)\n", "1 // run.rank\n"))
    words = ["--hosts", "a,b", "--server-hosts", "s,t", "--strategy", "server=2", "served.py"]
    with hosts_command(folder, "launch", *words) as command:
        code, _, stderr = command.end()
        assert command.others() == []
    assert code == 1, stderr
    assert "rank 0 of 2 on a failed: ZeroDivisionError" in stderr
    assert "servers" not in stderr


@pytest.mark.slow
@pytest.mark.parametrize("comes_back", [True, False])
def test_a_training_run_starts_again_from_its_checkpoint(tmp_path: Path, comes_back: bool) -> None:
    job = write_job(tmp_path, strategy="server=2", train__epochs=40)
    words = ["train", job, "--hosts", "a,b", "--server-hosts", "s,t", "--min-hosts", "2"]
    with hosts_command(tmp_path, *words, FAKE_SSH_DOWN=str(tmp_path), **VARIABLES) as command:
        until(lambda: has_saved(tmp_path, command))
        if not comes_back:
            (tmp_path / "s").touch()
        kill([command.agent("s")])
        code, _, stderr = command.end()
        assert command.others() == []
    assert code == 0, stderr
    assert "2 processes start from the checkpoint of step" in stderr
    assert ("note: the run goes on without s" in stderr) == (not comes_back)


@pytest.mark.slow
def test_a_server_that_is_killed_is_started_again_on_its_host(tmp_path: Path) -> None:
    job = write_job(tmp_path, strategy="server=2,replicas=2", train__epochs=100_000)
    words = ["train", job, "--hosts", "a", "--server-hosts", "s,t"]

    def members() -> set[int]:
        """Return the processes of the servers that are no longer filled."""
        if not (tmp_path / "run/servers.json").exists():
            return set()
        found = send_command(tmp_path / "run", "list", [])
        return {server["pid"] for server in found if server["role"] != "joining"}

    with hosts_command(tmp_path, *words, **VARIABLES) as command:
        until(lambda: len(members()) == 4)
        before = members()
        killed = min(before)
        kill([killed])
        until(lambda: len(members()) == 4 and killed not in members())
        assert len(members() & before) == 3
        command.signal(signal.SIGTERM)
        code, _, stderr = command.end()
        assert command.others() == []
    assert code == 75, stderr
    lost = f"(process {killed}) was killed by SIGKILL"
    assert stderr.count(lost) == stderr.count("] note: ") == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--strategy ddp", "the command names 0 parameter servers, fewer than hosts for them"),
        ("", "the command names 0 parameter servers"),
        ("--strategy server=1", "the command names 1 parameter servers, fewer than hosts"),
    ],
)
def test_strategies_without_a_server_for_each_host_are_refused_before_any_ssh(
    words: str, told: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("SHOAL_SSH", "no-such-program")
    command = ["launch", "--hosts", "a,b", "--server-hosts", "s,t", *words.split(), "served.py"]
    with pytest.raises(SystemExit, match="2"):
        main(command)
    assert f"--server-hosts s,t: {told}" in capsys.readouterr().err


def test_hosts_of_ssh_are_refused_beside_slurm(folder: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    words = ["--strategy", "server=2", "--server-hosts", "s,t", "served.py"]
    with pytest.raises(SystemExit, match="2"):
        main(["launch", "--slurm", "--dry-run", *words])
    assert (
        "--server-hosts: not with --slurm, for which srun starts the ranks. Give --nodes"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("s,b", "b has ranks, by --hosts. Name another host"),
        ("s:2", "s:2: it has no ranks, so no number"),
        ("s,s", "s is named twice. Name it once$"),
        ("s,", "'' is no host"),
        ("s,s:3,b", "s is named twice(.|\\n)*s:3: it has no ranks(.|\\n)*b has ranks"),
        ("-s", "'-s' is no host"),
    ],
)
def test_a_list_of_hosts_that_cannot_have_servers_alone_is_refused(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        parse_hosts(text, parse_hosts("a:2,b"))


def test_a_host_under_two_names_cannot_have_ranks_and_servers_of_its_own() -> None:
    hosts = [(SshHost("a", 1), FACTS), (SshHost("s", 0), FACTS)]
    assert problems(hosts, FactsRequest("/"), FACTS) == [
        "host s is host a (name): servers would share its machine with ranks. Leave it out of "
        "--server-hosts"
    ]


def test_an_error_of_servers_ends_the_run_and_is_told_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    connections: Any = SimpleNamespace(session=None, name="astu".__getitem__, drop=lambda _: "")
    ranks = RemoteRanks(connections, [HostRanks(0, 0, 1)], servers=[1, 2, 3])
    failed = {"do": "failed", "rank": 1, "age_s": 0.0, "headline": "", "text": "no such optimizer"}
    failed |= {"is_secondary": False, "code": 2, "is_loss": False}
    (failure,) = ranks._rank_events(HostEvent(1, failed))
    assert isinstance(failure, Failure)
    assert failure.describe(1) == "no such optimizer"
    assert failure.host == "s"
    assert ranks._rank_events(HostEvent(1, {"do": "ended", "rank": 1, "code": 1})) == []
    assert ranks._rank_events(HostEvent(2, {"do": "ended", "rank": 2, "code": 0})) == []
    assert ranks._rank_events(HostEvent(2, {"do": "lost", "reason": "gone"})) == []
    assert "on t is lost" in capsys.readouterr().err
