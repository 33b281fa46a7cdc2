"""The facts about one host that decide whether a run can start there; collected on that host."""

from __future__ import annotations

import getpass
import hashlib
import os
import platform
import re
import shutil
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from shoal.launch.hosts.addresses import local_addresses
from shoal.launch.hosts.checked_json import CheckedJson
from shoal.platform.cgroups import cgroup_limits, usable_cores
from shoal.platform.files import existing_directory
from shoal.platform.interfaces import HostAddress
from shoal.platform.processes import boot_id

PROTOCOL = 3
"""Version of the messages between driver and agent; it must be equal on both sides."""
DIGEST_LETTERS = 16
PACKAGE = Path(__file__).parents[2]


@dataclass(frozen=True)
class FactsRequest(CheckedJson):
    """The paths of a run that a host is asked about.

    Args:
        cwd: the working directory of the ranks, absolute.
        script: the file that ranks run, absolute or below `cwd`; None where they run an experiment
            of Shoal.
        run_directory: where checkpoints go, likewise; None where there are none.
    """

    cwd: str
    script: str | None = None
    run_directory: str | None = None


@dataclass(frozen=True)
class HostFacts(CheckedJson):
    """Facts about one host.

    Args:
        protocol: PROTOCOL of its Shoal.
        shoal: version of its Shoal.
        source: digest of its Shoal's source files.
        python: version of its Python.
        torch: version of its torch; None where there is none.
        hostname: the name that it gives itself.
        identity: equal exactly for agents on one host: the kernel's boot id and namespaces, or
            SHOAL_HOST.
        cores: cores that processes there may use.
        memory_bytes: memory that new processes may take; None where it is not known.
        shm_bytes: free bytes of /dev/shm; None where there is none.
        run_disk_bytes: free bytes where the run directory lies or would lie; None where it
            cannot be written or none was asked for.
        time_s: its clock, in seconds since 1970.
        user: the user there.
        cwd_exists: the working directory of the ranks is a directory there that can be entered.
        script_digest: digest of the ranks' script; None where there is none or it cannot be read.
        addresses: addresses of interfaces that are up, without loopback and link-local ones.
        ssh_address: its own address of the connection by which ssh reached it; None where ssh did
            not.
    """

    protocol: int
    shoal: str
    source: str
    python: str
    torch: str | None
    hostname: str
    identity: str
    cores: int
    memory_bytes: int | None
    shm_bytes: int | None
    run_disk_bytes: int | None
    time_s: float
    user: str
    cwd_exists: bool
    script_digest: str | None
    addresses: tuple[HostAddress, ...]
    ssh_address: str | None


def collect_facts(request: FactsRequest) -> HostFacts:
    """Return the facts about this host. It neither imports torch nor writes anything."""
    return HostFacts(
        protocol=PROTOCOL,
        # An import of the package would be one of everything that it offers.
        shoal=str(sys.modules["shoal"].__version__),
        source=source_digest(),
        python=platform.python_version(),
        torch=_torch_version(),
        hostname=socket.gethostname(),
        identity=_identity(),
        cores=usable_cores(),
        memory_bytes=_memory_bytes(),
        shm_bytes=_free_bytes(Path("/dev/shm")),
        run_disk_bytes=_run_disk_bytes(request),
        time_s=time.time(),
        user=_user(),
        cwd_exists=os.path.isdir(request.cwd) and os.access(request.cwd, os.X_OK),
        script_digest=_script_digest(request),
        addresses=_addresses(),
        ssh_address=_ssh_address(),
    )


@cache
def source_digest() -> str:
    """Return a digest of the names and contents of Shoal's source files.

    Versions alone do not tell two clones of the repository apart.
    """
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(PACKAGE).as_posix()} {content}\n".encode())
    return digest.hexdigest()[:DIGEST_LETTERS]


def _torch_version() -> str | None:
    """Return the version in torch's own file: importlib.metadata would take ten times as long."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    with suppress(OSError):
        text = Path(spec.origin).with_name("version.py").read_text()
        if found := re.search(r"""^__version__ = ['"](.+)['"]""", text, re.MULTILINE):
            return found[1]
    return None


def _identity() -> str:
    if name := os.environ.get("SHOAL_HOST"):
        return name
    words = [boot_id() or socket.gethostname()]
    for namespace in ("net", "pid"):
        with suppress(OSError):
            words.append(os.readlink(f"/proc/self/ns/{namespace}"))
    return " ".join(words)


def _memory_bytes() -> int | None:
    """Return the memory that is available here, within the limit of the control group."""
    _, limit = cgroup_limits()
    available = limit
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        available = int(line.split()[1]) * 1024
    return available if limit is None or available is None else min(available, limit)


def _free_bytes(directory: Path) -> int | None:
    with suppress(OSError):
        return shutil.disk_usage(directory).free
    return None


def _run_disk_bytes(request: FactsRequest) -> int | None:
    if request.run_directory is None:
        return None
    directory = existing_directory(os.path.join(request.cwd, request.run_directory))
    return _free_bytes(directory) if os.access(directory, os.W_OK | os.X_OK) else None


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user without a name; Python 3.13 raises OSError
        return str(os.geteuid())


def _script_digest(request: FactsRequest) -> str | None:
    if request.script is None:
        return None
    path = os.path.join(request.cwd, request.script)
    if not os.path.isfile(path):  # a named pipe would be waited for without end
        return None
    with suppress(OSError), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:DIGEST_LETTERS]
    return None


def _addresses() -> tuple[HostAddress, ...]:
    try:
        return local_addresses()
    except OSError:
        return ()


def _ssh_address() -> str | None:
    """Return the third word of `client-address client-port server-address server-port`."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    return words[2].partition("%")[0] if len(words) == 4 else None
