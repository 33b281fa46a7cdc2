"""The place of a process in its world, and the variables of a launcher, with all their problems."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

T = TypeVar("T")
Launcher = Literal["single", "shoal", "torchrun", "slurm", "mpi", "environment"]
LOOPBACK = "127.0.0.1"
# Derived rendezvous ports. The range lies below the ephemeral ports of Linux (from 32768) and the
# node ports of Kubernetes (from 30000), so that no system hands out one of them by itself.
FIRST_PORT = 15_000
PORTS = 15_000


class Variables:
    """The variables of a launcher. A missing or malformed value adds a sentence to `problems`.

    Reading goes on after a problem, with None or 0 in place of the value. A caller must look at
    `problems` before it relies on what it has read.

    Args:
        environ: the variables; an empty value counts as not set.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = {name: value for name, value in environ.items() if value}
        self.problems: list[str] = []

    def has(self, *names: str) -> bool:
        """Return True if at least one of `names` is set."""
        return any(name in self.environ for name in names)

    def text(self, *names: str) -> str | None:
        """Return the value of the first of `names` that is set; None if none is."""
        return next((self.environ[name] for name in names if name in self.environ), None)

    def number(self, *names: str) -> int | None:
        """Return the first of `names` that is set, as an integer >= 0; None if none is set.

        A value that is no such integer is a problem, and gives None too.
        """
        name = next((name for name in names if name in self.environ), None)
        if name is None:
            return None
        value = self.environ[name]
        # isdigit alone accepts digits such as a superscript two, which int() refuses.
        if value.isascii() and value.isdigit():
            return int(value)
        self.problems.append(f"{name}={value} is not a whole number of 0 or more.")
        return None

    def required_number(self, *names: str) -> int:
        """Return the same as `number`, but 0 and a problem where none of `names` is set."""
        if not self.has(*names):
            self.problems.append(f"{names[0]} is missing.")
        return self.number(*names) or 0

    def required(self, name: str, read: Callable[[str], T]) -> T | None:
        """Return `read(value)` of one variable.

        It is None, with a problem, where the variable is missing or `read` raises ValueError.
        """
        if not self.has(name):
            self.problems.append(f"{name} is missing.")
            return None
        try:
            return read(self.environ[name])
        except ValueError as error:
            self.problems.append(f"{name}: {error}.")
            return None


@dataclass(frozen=True)
class RankInfo:
    """A process's place in its world.

    Args:
        rank: 0 <= rank < world.
        world: the number of ranks of the run.
        local_rank: the rank's number on its host, 0 <= local_rank < local_world.
        local_world: the number of ranks on its host.
        launcher: the launcher whose variables decided.
        master_address: the host of the rendezvous; None where the process needs none.
        master_port: the port of the rendezvous; None where the process needs none.
        reason: why this launcher decided, for the user.
        store: the path of the launcher's own store, see `private_memory`; None where there is none.
        server_hosts: the number of hosts that have parameter servers and no rank.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    launcher: Launcher
    master_address: str | None
    master_port: int | None
    reason: str
    store: str | None = None
    server_hosts: int = 0

    def describe(self) -> str:
        """Return one line for the header of the run."""
        if self.launcher == "single":
            return f"1 process ({self.reason})"
        rendezvous = ""
        if self.master_address is not None:
            rendezvous = f", meeting at {self.master_address}:{self.master_port}"
        local = f"{self.local_rank} of {self.local_world} on this machine"
        return f"rank {self.rank} of {self.world} ({local}){rendezvous}; {self.reason}"


def rendezvous_address(
    variables: Variables, host: str | None, job: str | None
) -> tuple[str | None, int | None]:
    """Return MASTER_ADDR and MASTER_PORT, or defaults that are the same on all ranks of a job.

    Args:
        host: the address where MASTER_ADDR is not set.
        job: an id of the job; the default port is a hash of it. None: MASTER_PORT is needed.
    """
    address = variables.text("MASTER_ADDR") or host
    if job is None or variables.has("MASTER_PORT"):
        return address, variables.required_number("MASTER_PORT")
    return address, FIRST_PORT + zlib.crc32(job.encode()) % PORTS
