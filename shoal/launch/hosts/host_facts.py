"""The facts about one host that decide whether a run can start there; collected on that host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal.launch.hosts.addresses import HostAddress

PROTOCOL = 1
"""Version of the messages between driver and agent; it must be equal on both sides."""


@dataclass(frozen=True)
class FactsRequest:
    """The paths of a run that a host is asked about.

    Args:
        cwd: the working directory of the ranks.
        script: the file that ranks run; None where they run an experiment of Shoal.
        run_directory: where checkpoints go; None where there are none.
    """

    cwd: str
    script: str | None = None
    run_directory: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the request as an object of JSON."""
        raise NotImplementedError

    @classmethod
    def from_json(cls, document: object) -> FactsRequest:
        """Return the request of an object of JSON. Raises ValueError where it is none."""
        raise NotImplementedError


@dataclass(frozen=True)
class HostFacts:
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
        memory_bytes: memory that new processes may take.
        shm_bytes: free bytes of /dev/shm; None where there is none.
        run_disk_bytes: free bytes where the run directory lies or would lie; None where it
            cannot be written.
        time_s: its clock, in seconds since 1970.
        user: the user there.
        cwd_exists: the working directory of the ranks is a directory there.
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
    memory_bytes: int
    shm_bytes: int | None
    run_disk_bytes: int | None
    time_s: float
    user: str
    cwd_exists: bool
    script_digest: str | None
    addresses: tuple[HostAddress, ...]
    ssh_address: str | None

    def to_json(self) -> dict[str, Any]:
        """Return the facts as an object of JSON."""
        raise NotImplementedError

    @classmethod
    def from_json(cls, document: object) -> HostFacts:
        """Return the facts of an object of JSON.

        Raises:
            ValueError: a field is missing or of another type. Unknown fields are ignored.
        """
        raise NotImplementedError


def collect_facts(request: FactsRequest) -> HostFacts:
    """Return the facts about this host. It neither imports torch nor writes anything."""
    raise NotImplementedError
