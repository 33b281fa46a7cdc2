"""Real hosts on one machine, for tests: namespaces with an ssh server each, joined by a bridge.

            switch ─ bridge ─┬──────────┬──────────┐
                           eth0       eth0       eth0
    desk (the driver's host)      node1      node2      ...        10.77.0.N, or fd77::N

A host has its own network, processes, name, /proc, /dev/shm, /tmp, /etc/hosts and disk (/mnt, where
the homes are). All see the same programs, and one directory of the test, the shared disk. Nothing
of the machine around is changed, and all of it ends with the process of the test, even by SIGKILL.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from host_files import REPOSITORY, SETUP, SHELLS, Names, write_etc, write_ssh_config

PROGRAMS = ("sshd", "ssh", "ssh-keygen", "ip", "bridge", "unshare", "nsenter", "setpriv")
NAMESPACES = ("--net", "--mount", "--uts", "--ipc", "--pid")
START_S = 30.0
SEARCH = f"{os.environ['PATH']}:/usr/sbin:/sbin"

Network = Literal["one", "two", "v6"]
"""Networks of the hosts.

    one   all are joined by 10.77.0.0/24
    two   on 10.77.0.0/24 each reaches the desk alone; 10.78.0.0/24 joins all but the desk
    v6    all are joined by fd77::/64, and there is no IPv4
"""


@functools.cache
def missing() -> str:
    """Return why there can be no such hosts here; empty where there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "namespaces need Linux and root"
    absent = [name for name in PROGRAMS if shutil.which(name, path=SEARCH) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (Debian: openssh-server, iproute2, util-linux)"
    tried = subprocess.run(
        ["unshare", *NAMESPACES, "--fork", "--mount-proc", "true"], capture_output=True, text=True
    )
    return "" if tried.returncode == 0 else f"no namespaces can be made: {tried.stderr.strip()}"


needs_hosts = pytest.mark.skipif(bool(missing()), reason=missing())


@dataclass
class Host:
    """One host: its name, its address, and the process that keeps its namespaces."""

    name: str
    number: int
    address: str
    keeper: subprocess.Popen[str]
    pid: int
    first_pids: set[int] = field(default_factory=set)

    def enter(self, *namespaces: str) -> list[str]:
        """Return the words before a command that is to run on this host."""
        return ["nsenter", f"--target={self.pid}", *(namespaces or NAMESPACES), "--"]

    def pids(self) -> set[int]:
        """Return the processes of this host, as this machine numbers them."""
        found = set()
        with contextlib.suppress(OSError):
            own = os.readlink(f"/proc/{self.pid}/ns/pid")
            for entry in os.listdir("/proc"):
                with contextlib.suppress(OSError):
                    if entry.isdigit() and os.readlink(f"/proc/{entry}/ns/pid") == own:
                        found.add(int(entry))
        return found


class Hosts:
    """Hosts named node1, node2 ..., and `desk`, from which they are reached by ssh.

    Args:
        folder: an empty directory of this test.
        count: of the nodes.
        network, names: see above.
        ssh_config: further lines of the desk's ssh_config.
        startups: MaxStartups of the servers.
        disk_bytes: size of each host's own disk.

    Attributes:
        shared: the directory that all hosts see.
        ssh: the words of the ssh client on the desk.
    """

    def __init__(
        self,
        folder: Path,
        count: int = 2,
        network: Network = "one",
        names: Names = "all",
        ssh_config: str = "",
        startups: str = "10:30:100",
        disk_bytes: int = 1 << 28,
    ) -> None:
        self.folder = folder
        self.shared = folder / "shared"
        self.shared.mkdir(parents=True)
        self.network, self.names = network, names
        self._startups, self._disk_bytes = startups, disk_bytes
        self.ssh = ["ssh", "-F", str(folder / "ssh_config")]
        self._keepers: list[subprocess.Popen[str]] = []
        self._names = ["desk", *(f"node{number}" for number in range(1, count + 1))]
        try:
            self._make_keys()
            self._switch, switch_pid = self._keeper(["--net"], "ip link set lo up; echo ready; cat")
            self._at_switch = ["nsenter", f"--target={switch_pid}", "--net", "--"]
            self.hosts = [self._host(number) for number in range(count + 1)]
            self._join("br0", 0)
            if network == "two":
                self._join("br1", 1)
            self._write_ssh_config(ssh_config)
            for host in self.hosts:
                self._wait_for_ssh(host)
            for host in self.hosts:
                host.first_pids = host.pids()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes of all hosts; the namespaces go with the last of them."""
        for keeper in self._keepers:
            keeper.kill()
        for keeper in self._keepers:
            keeper.wait()
            assert keeper.stdin
            assert keeper.stdout
            keeper.stdin.close()
            keeper.stdout.close()

    @property
    def desk(self) -> Host:
        return self.hosts[0]

    @property
    def nodes(self) -> list[Host]:
        return self.hosts[1:]

    def environment(self, host: Host, **more: str) -> dict[str, str]:
        """Return the variables of a command on this host."""
        return {
            "PATH": SEARCH,
            "HOME": f"/mnt/home/{SHELLS[0]}",
            "PYTHONPATH": str(REPOSITORY),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "SHOAL_SSH": " ".join(self.ssh),
            **more,
        }

    def start(self, host: Host, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a command on a host. The caller ends it; the end of the hosts does too."""
        environment: Mapping[str, str] = options.pop("env", {})
        return subprocess.Popen(
            [*host.enter(), *command], env=self.environment(host, **environment), **options
        )

    def run(
        self, host: Host, command: Sequence[str], text: str = "", **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host, with `text` as its input, and return its output."""
        return subprocess.run(
            [*host.enter(), *command],
            input=text,
            capture_output=True,
            text=True,
            timeout=120,
            cwd="/",
            env=self.environment(host, **env),
        )

    def write(self, host: Host, path: str, text: str) -> None:
        """Write a file as the host sees it; a relative path is below its home of bash."""
        home = f"/mnt/home/{SHELLS[0]}/"
        script = 'mkdir -p "$(dirname "$1")" && cat > "$1"'
        self.run(host, ["sh", "-c", script, "sh", home + path], text).check_returncode()

    def cut(self, host: Host) -> None:
        """Take a host's cables out of the switch: packets are lost silently."""
        for bridge in self._bridges():
            self._ip("link", "set", f"{bridge}v{host.number}", "nomaster")

    def heal(self, host: Host) -> None:
        """Put the cables back."""
        for bridge in self._bridges():
            self._ip("link", "set", f"{bridge}v{host.number}", "master", bridge)

    def lose(self, host: Host) -> None:
        """Let a host lose its power: no packet says that it has gone."""
        self.cut(host)
        os.kill(host.pid, signal.SIGKILL)
        host.keeper.wait()

    def leftovers(self, patience_s: float = 10.0) -> dict[str, list[str]]:
        """Return the command lines of processes that were not there at the beginning, by host.

        It returns as soon as there are none.
        """
        end_s = time.monotonic() + patience_s
        while True:
            found = {host.name: list(_command_lines(host)) for host in self.hosts}
            found = {name: lines for name, lines in found.items() if lines}
            if not found or time.monotonic() > end_s:
                return found
            time.sleep(0.1)

    def _bridges(self) -> list[str]:
        return ["br0", "br1"] if self.network == "two" else ["br0"]

    def _make_keys(self) -> None:
        for name in ("user", *self._names):
            place = self.folder / "user" if name == "user" else self._etc(name) / "key"
            place.parent.mkdir(exist_ok=True)
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(place)]
            subprocess.run(command, check=True)

    def _etc(self, name: str) -> Path:
        return self.folder / f"etc-{name}"

    def _host(self, number: int) -> Host:
        name = self._names[number]
        etc = self._etc(name)
        write_etc(etc, self.folder, self._names_of(number), self._startups)
        setup = SETUP.format(
            name=name,
            etc=etc,
            folder=self.folder,
            sshd=shutil.which("sshd", path=SEARCH),
            disk_bytes=self._disk_bytes,
            homes=" ".join(f"/mnt/home/{shell}" for shell in SHELLS),
        )
        options = [*NAMESPACES, "--mount-proc", "--propagation=private"]
        keeper, pid = self._keeper(options, setup)
        return Host(name, number, self._address(number), keeper, pid)

    def _keeper(self, options: list[str], script: str) -> tuple[subprocess.Popen[str], int]:
        """Start a process in new namespaces. Return the process around it and its own id."""
        command = ["setpriv", "--pdeathsig=KILL", "unshare", *options, "--fork", "--kill-child"]
        keeper = subprocess.Popen(
            [*command, "bash", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PATH": SEARCH},
        )
        self._keepers.append(keeper)
        assert keeper.stdout
        line = keeper.stdout.readline()
        assert line == "ready\n", f"a host could not be set up: {line}"
        return keeper, int(Path(f"/proc/{keeper.pid}/task/{keeper.pid}/children").read_text())

    def _names_of(self, number: int) -> Iterator[str]:
        yield "127.0.0.1 localhost"
        yield "::1 localhost"
        for other, name in enumerate(self._names):
            if self.names == "debian" and other == number:
                yield f"127.0.1.1 {name}"
            elif self.names != "none":
                yield f"{self._address(other)} {name}"

    def _address(self, number: int, network: int = 0) -> str:
        host = 100 + number
        return f"fd77::{host}" if self.network == "v6" else f"10.{77 + network}.0.{host}"

    def _join(self, bridge: str, network: int) -> None:
        """Join the hosts by a bridge. Their interface is called eth0, or eth1."""
        self._ip("link", "add", bridge, "type", "bridge")
        self._ip("link", "set", bridge, "up")
        for host in self.hosts[network:]:  # the desk is in the first network alone
            cable = f"{bridge}v{host.number}"
            interface = ["peer", "name", f"eth{network}", "netns", str(host.pid)]
            self._ip("link", "add", cable, "type", "veth", *interface)
            self._ip("link", "set", cable, "master", bridge, "up")
            if self.network == "two" and network == 0 and host.number > 0:
                self._isolate(host)
            place = f"{self._address(host.number, network)}/{64 if self.network == 'v6' else 24}"
            quick = ["nodad"] if self.network == "v6" else []
            for words in (["addr", "add", place, *quick, "dev"], ["link", "set", "up", "dev"]):
                command = [*host.enter("--net"), "ip", *words, f"eth{network}"]
                subprocess.run(command, check=True)

    def _isolate(self, host: Host) -> None:
        """Isolate a host's port of br0: it reaches only those that are not isolated."""
        words = ["link", "set", "dev", f"br0v{host.number}", "isolated", "on"]
        subprocess.run([*self._at_switch, "bridge", *words], check=True)

    def _ip(self, *words: str) -> None:
        subprocess.run([*self._at_switch, "ip", *words], check=True)

    def _write_ssh_config(self, more: str) -> None:
        keys = {host.name: (self._etc(host.name) / "key.pub").read_text() for host in self.hosts}
        addresses = {host.name: host.address for host in self.hosts}
        write_ssh_config(self.folder, addresses, keys, more)

    def _wait_for_ssh(self, host: Host) -> None:
        """Wait until the ssh server listens, without a connection that it would count."""
        end_s = time.monotonic() + START_S
        listens = [*host.enter("--net"), "sh", "-c", "grep -q ':0016 .* 0A ' /proc/net/tcp*"]
        while subprocess.run(listens).returncode != 0:
            log = self._etc(host.name) / "sshd.log"
            assert time.monotonic() < end_s, f"no ssh server on {host.name}: {log.read_text()}"
            time.sleep(0.05)


def _command_lines(host: Host) -> Iterator[str]:
    for pid in sorted(host.pids() - host.first_pids):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z":
                yield b" ".join(words).decode(errors="replace").strip()
