"""Seconds from a command until the agents of N hosts have told their facts, over one real sshd.

    python -m benchmarks.launch.many_hosts            # 1, 8 and 30 hosts
    python -m benchmarks.launch.many_hosts 100

Each host is an alias of ssh_config, h1 to hN, for an address of the loopback interface. So all
agents, and both ends of all connections, share the cores of this machine: the growth with N is the
result, not the seconds. No rank is started, as their import of torch would be all that is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import shoal
from shoal.launch.hosts.host_facts import FactsRequest
from shoal.launch.hosts.hosts_job import HostsJob, HostsOptions
from shoal.launch.hosts.ssh_client import SshHost
from shoal.launch.restarting import Work

SOURCES = Path(shoal.__file__).parents[1]
SSHD = """
ListenAddress 0.0.0.0:{port}
HostKey {folder}/server
AuthorizedKeysFile {folder}/user.pub
StrictModes no
UsePAM no
PermitRootLogin yes
PidFile none
MaxStartups {startups}
SetEnv PYTHONPATH={sources} PYTHONPYCACHEPREFIX={folder}/pycache
AcceptEnv SHOAL_HOST
"""
CLIENT = """
Host *
  Port {port}
  User {user}
  IdentityFile {folder}/user
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  StrictHostKeyChecking yes
  GlobalKnownHostsFile /dev/null
  HostKeyAlias server
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("hosts", type=int, nargs="*", default=[1, 8, 30])
    parser.add_argument("--startups", default="300:30:400", help="MaxStartups of the server")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        ssh_server(Path(folder), max(options.hosts), options.startups),
    ):
        connect(1)  # compiles modules, as an installation does, and loads files into the page cache
        for count in options.hosts:
            print(f"{count:4} hosts ready after {connect(count):6.2f} s", flush=True)


def connect(count: int) -> float:
    """Connect to hosts and check them, as `shoal launch --hosts` does; return the seconds."""
    hosts = [SshHost(f"h{number}", 1) for number in range(1, count + 1)]
    options = HostsOptions(hosts, sys.executable)
    request = FactsRequest(os.getcwd())
    work = Work("builtins:print", (), (), {}, "first", ())
    started_s = time.monotonic()
    with HostsJob(options, work, request) as job:
        job.connect()
        return time.monotonic() - started_s


@contextlib.contextmanager
def ssh_server(folder: Path, count: int, startups: str) -> Iterator[None]:
    """Run an ssh server on the loopback interface, and name it to the client by SHOAL_SSH."""
    program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        raise SystemExit("There is no ssh server. On Debian and Ubuntu: apt install openssh-server")
    Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("user", "server"):
        key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(key, check=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = {"port": port, "folder": folder, "sources": SOURCES, "startups": startups}
    (folder / "sshd_config").write_text(SSHD.format(**words))
    (folder / "known_hosts").write_text(f"server {(folder / 'server.pub').read_text()}")
    aliases = [
        f"Host h{number}\n  HostName 127.0.1.{number}\n  SetEnv SHOAL_HOST=h{number}\n"
        for number in range(1, count + 1)
    ]
    client = CLIENT.format(user=getpass.getuser(), **words)
    (folder / "config").write_text("".join(aliases) + client)
    os.environ["SHOAL_SSH"] = f"ssh -F {folder / 'config'}"
    server = subprocess.Popen(
        [program, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=subprocess.DEVNULL
    )
    try:
        wait_for(port)
        yield
    finally:
        server.terminate()
        server.wait()


def wait_for(port: int) -> None:
    """Wait until the server listens; a connection would count as a failed login."""
    end_s = time.monotonic() + 10.0
    while f":{port:04X} 00000000:0000 0A" not in Path("/proc/net/tcp").read_text():
        if time.monotonic() > end_s:
            raise SystemExit("The ssh server did not start.")
        time.sleep(0.02)


if __name__ == "__main__":
    main()
