"""`shoal launch --hosts` on real hosts: namespaces with an ssh server each."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from desk_command import DeskCommand
from namespaces import Hosts, needs_hosts

from tests.harness.waiting import until

pytestmark = [pytest.mark.slow, needs_hosts]

HERE = Path(__file__).parent
LEFT_S = 10.0
DISTURBING = (
    "Host node*\n  RemoteCommand tmux\n  RequestTTY force\n  LocalForward 8080 localhost:80\n"
    "  ExitOnForwardFailure yes\n  ControlMaster auto\n  ControlPersist 600\n"
    "  ControlPath /mnt/master-%n\n"
)
WAITS = """
import os, pathlib, subprocess, time
subprocess.Popen(["sleep", "600"], start_new_session=True)
pathlib.Path(f"ready.{os.environ['RANK']}").write_text("")
time.sleep(600)
"""
# The script's own group, and one of Shoal's mesh: shared memory inside a host, Gloo between hosts.
OF_SHOAL = """
import os, torch, shoal
run = shoal.init()
import torch.distributed as dist
value = torch.full((1000,), run.rank + 1.0, dtype=torch.float64)
dist.all_reduce(value)
assert (value == 10).all()
print("shoal on", os.environ["SHOAL_ADDRESS"], flush=True)
"""
MEETS = """
import os, sys, time, torch, torch.distributed as dist
world = int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
for _ in range(20):
    number = torch.tensor([float(sys.argv[1])])
    dist.all_reduce(number)
    assert number.item() == world * float(sys.argv[1])
    time.sleep(0.05)
print("met", sys.argv[1])
"""


def launch(hosts: Hosts, *words: str) -> DeskCommand:
    return DeskCommand(hosts, "launch", *words)


def waiting(hosts: Hosts) -> DeskCommand:
    """Start two ranks that wait, on a host each, and return once they do."""
    command = launch(hosts, "--hosts", "node1:1,node2:1", "waits.py")
    until(lambda: command.process.poll() or len(list(hosts.shared.glob("ready.*"))) == 2)
    assert command.process.poll() is None, command.end()
    return command


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(tmp_path / "hosts", 2, names="debian", ssh_config=DISTURBING) as hosts:
        (hosts.shared / "waits.py").write_text(WAITS)
        yield hosts


@pytest.mark.parametrize(
    ("network", "names"), [("one", "debian"), ("two", "all"), ("two", "none"), ("v6", "none")]
)
def test_ranks_of_all_hosts_compute_what_one_process_does(tmp_path: Path, network, names):
    with Hosts(tmp_path / "hosts", 3, network, names) as hosts:
        shutil.copy(HERE / "ddp_script.py", hosts.shared / "train.py")
        words = ["--hosts", "node1:1,node2:2,node3:1", "--show-output", "all"]
        code, stdout, stderr = launch(hosts, *words, "train.py").end()
        assert code == 0, stderr
        assert sorted(line.split(" of 4 ")[0] for line in stdout.splitlines()) == [
            "0",
            "[rank 1 on node2] 1",
            "[rank 2 on node2] 2",
            "[rank 3 on node3] 3",
        ]
        (hosts.shared / "of_shoal.py").write_text(OF_SHOAL)
        code, stdout, stderr = launch(hosts, *words, "of_shoal.py").end()
        assert code == 0, stderr
        assert stdout.count("shoal on") == 4
        assert "127.0" not in stdout
        assert hosts.leftovers(LEFT_S) == {}


def test_noise_of_login_shells_disturbs_nothing(hosts: Hosts):
    """With the settings of DISTURBING, too."""
    shutil.copy(HERE / "ddp_script.py", hosts.shared / "train.py")
    hosts.write(hosts.nodes[0], ".bashrc", "echo Welcome; read -t 1 eaten; printf 'no newline'\n")
    hosts.run(hosts.nodes[1], ["tee", "/mnt/home/tcsh/.tcshrc"], "echo Welcome\n")
    code, stdout, stderr = launch(hosts, "--hosts", "node1:1,tcsh@node2:1", "train.py").end()
    assert code == 0, stderr
    assert stdout.startswith("0 of 2 ")
    assert hosts.leftovers(LEFT_S) == {}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_on_any_host_when_the_command_is_ended(hosts: Hosts, number):
    command = waiting(hosts)
    command.signal(number)
    command.end()
    assert hosts.leftovers(LEFT_S) == {}


@pytest.mark.parametrize("fault", [Hosts.cut, Hosts.lose])
def test_a_host_that_is_gone_is_named_and_no_process_is_left(
    hosts: Hosts, fault: Callable[[Hosts, object], None]
):
    command = waiting(hosts)
    fault(hosts, hosts.nodes[1])
    code, _, stderr = command.end()
    assert code == 1
    assert "rank 1 of 2 on node2 is lost: the host does not answer any more" in stderr
    left = hosts.leftovers(LEFT_S)
    # The ssh server of a host without its link notices that after many minutes.
    assert [line for lines in left.values() for line in lines if "sshd" not in line] == []


def test_two_jobs_on_the_same_hosts_never_meet(hosts: Hosts):
    (hosts.shared / "meets.py").write_text(MEETS)
    commands = [launch(hosts, "--hosts", "node1:1,node2:1", "meets.py", str(n)) for n in (1, 2)]
    for number, command in enumerate(commands, 1):
        code, stdout, stderr = command.end()
        assert (code, stdout) == (0, f"met {number}\n"), stderr
    assert hosts.leftovers(LEFT_S) == {}
