"""One process's place among all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Launcher = Literal["single", "shoal", "torchrun", "slurm", "mpi", "environment"]


@dataclass(frozen=True)
class RankInfo:
    """Where this process stands in its world.

    Args:
        rank, world: 0 <= rank < world.
        local_rank, local_world: the same among the ranks on this machine.
        launcher: whose variables decided.
        master_address, master_port: where the ranks meet; None where there is nobody to meet.
        reason: why it was decided so, for the user.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    launcher: Launcher
    master_address: str | None
    master_port: int | None
    reason: str

    def describe(self) -> str:
        """One line for the run's header."""
        if self.launcher == "single":
            return f"1 process ({self.reason})"
        meeting = (
            ""
            if self.master_address is None
            else f", meeting at {self.master_address}:{self.master_port}"
        )
        here = f"{self.local_rank} of {self.local_world} on this machine"
        return f"rank {self.rank} of {self.world} ({here}){meeting}; {self.reason}"
