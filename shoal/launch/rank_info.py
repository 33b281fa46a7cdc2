"""A process's place in its world: its rank, and who decided it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Launcher = Literal["single", "shoal", "torchrun", "slurm", "mpi", "environment", "tf_config"]


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
        store: the path of the launcher's own store, see `private_store`; None where there is none.
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

    def describe(self) -> str:
        """Return one line for the header of the run."""
        if self.launcher == "single":
            return f"1 process ({self.reason})"
        rendezvous = ""
        if self.master_address is not None:
            rendezvous = f", meeting at {self.master_address}:{self.master_port}"
        local = f"{self.local_rank} of {self.local_world} on this machine"
        return f"rank {self.rank} of {self.world} ({local}){rendezvous}; {self.reason}"
