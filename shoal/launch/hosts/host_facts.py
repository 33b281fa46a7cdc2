"""The facts about hosts that decide whether a run can start there, each collected on its host.

The driver judges them: every problem of every host comes in one list.
"""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from shoal.launch.hosts.addresses import local_addresses
from shoal.launch.hosts.ssh_client import SshHost
from shoal.platform.files import existing_directory
from shoal.platform.processes import host_id

DIGEST_LETTERS = 16
PACKAGE = Path(__file__).parents[2]


@dataclass(frozen=True)
class FactsRequest:
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
class HostFacts:
    """Facts about one host.

    Args:
        shoal: version of its Shoal.
        source: digest of its Shoal's source files.
        python: version of its Python.
        torch: version of its torch; None where there is none.
        hostname: the name that it gives itself.
        identity: equal exactly for agents on one host, see `host_id`.
        can_write: files can be made where the run directory lies or would lie; True where none was
            asked for.
        cwd_exists: the working directory of the ranks is a directory there that can be entered.
        script_digest: digest of the ranks' script; None where there is none or it cannot be read.
        addresses: addresses of interfaces that are up, without loopback and link-local ones.
        ssh_address: its own address of the connection by which ssh reached it; None where ssh did
            not.
    """

    shoal: str
    source: str
    python: str
    torch: str | None
    hostname: str
    identity: str
    can_write: bool
    cwd_exists: bool
    script_digest: str | None
    addresses: list[str]
    ssh_address: str | None

    @classmethod
    def from_json(cls, document: Any) -> HostFacts:
        """Return the facts of `asdict`, after a way through JSON. Unknown fields are ignored."""
        return cls(**{field.name: document[field.name] for field in fields(cls)})


def collect_facts(request: FactsRequest) -> HostFacts:
    """Return the facts about this host. It neither imports torch nor writes anything."""
    return HostFacts(
        # An import of the package would be one of everything that it offers.
        shoal=str(sys.modules["shoal"].__version__),
        source=source_digest(),
        python=platform.python_version(),
        torch=_torch_version(),
        hostname=socket.gethostname(),
        identity=host_id("net", "pid"),
        can_write=_can_write(request),
        cwd_exists=os.path.isdir(request.cwd) and os.access(request.cwd, os.X_OK),
        script_digest=_script_digest(request),
        addresses=local_addresses(),
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
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def _can_write(request: FactsRequest) -> bool:
    if request.run_directory is None:
        return True
    directory = existing_directory(os.path.join(request.cwd, request.run_directory))
    return os.access(directory, os.W_OK | os.X_OK)


def _script_digest(request: FactsRequest) -> str | None:
    if request.script is None:
        return None
    path = os.path.join(request.cwd, request.script)
    if not os.path.isfile(path):  # a named pipe would be waited for without end
        return None
    with suppress(OSError), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:DIGEST_LETTERS]
    return None


def _ssh_address() -> str | None:
    """Return the third word of `client-address client-port server-address server-port`."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    return words[2].partition("%")[0] if len(words) == 4 else None


Checked = Sequence[tuple[SshHost, HostFacts]]


def problems(hosts: Checked, request: FactsRequest, here: HostFacts) -> list[str]:
    """Return all reasons for which the run cannot start; empty where it can.

    Args:
        hosts: every host that answered, with its facts, in the user's order.
        request: which the facts answer.
        here: the facts of the driver's own host, whose Shoal and script the others must have.
    """
    found = _repeated(hosts)
    for host, facts in hosts:
        found += [f"host {host.name}: {text}" for text in _own(host, facts, request)]
    for host, facts in hosts:
        first, first_facts = hosts[0]
        if facts.source != here.source:
            found.append(
                f"host {host.name} has another Shoal ({facts.shoal}, source {facts.source[:8]}; "
                f"here it is {here.shoal}, source {here.source[:8]}). Install the same there"
            )
        found += [f"host {host.name} {text}" for text in _versions(facts, first, first_facts)]
        digests = {facts.script_digest, here.script_digest}
        if host.count and None not in digests and len(digests) > 1:
            found.append(
                f"host {host.name}: {request.script} is not the file of this machine. Copy it there"
            )
    return found


def _repeated(hosts: Checked) -> list[str]:
    """Return a problem for each host that is another one under a second name."""
    first: dict[str, SshHost] = {}
    found = []
    for host, facts in hosts:
        other = first.setdefault(facts.identity, host)
        if other is host:
            continue
        cure = f"name it once, {SshHost(other.name, other.count + host.count)}"
        if other.count and not host.count:
            cure = "servers would share its machine with ranks. Leave it out of --server-hosts"
        found.append(f"host {host.name} is host {other.name} ({facts.hostname}): {cure}")
    return found


def _own(host: SshHost, facts: HostFacts, request: FactsRequest) -> Iterator[str]:
    """Yield problems of one host for which no other host matters."""
    if facts.torch is None:
        yield "torch is not installed for its Python. Give --python, or install it"
    if not host.count:  # servers read and write no file
        return
    if not facts.cwd_exists:
        yield f"there is no directory {request.cwd} that you can enter. Make it there"
    elif request.script is not None and facts.script_digest is None:
        yield f"{request.script} cannot be read in {request.cwd}. Copy it there"
    if not facts.can_write:
        yield f"you cannot write to the run directory {request.run_directory}"


def _versions(facts: HostFacts, first: SshHost, wanted: HostFacts) -> Iterator[str]:
    """Yield versions in which a host differs from the first one."""
    if facts.python.split(".")[:2] != wanted.python.split(".")[:2]:
        yield f"has Python {facts.python}, {first.name} has {wanted.python}. Give --python"
    if facts.torch and wanted.torch:
        # Without the label of the build: 2.13.0 of 2.13.0+cu130.
        releases = {version.partition("+")[0] for version in (facts.torch, wanted.torch)}
        if len(releases) > 1:
            yield f"has torch {facts.torch}, {first.name} has {wanted.torch}"
