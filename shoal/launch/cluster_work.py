"""The work of a command that a cluster's scheduler is to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.launch.output import Output


@dataclass(frozen=True)
class ClusterWork:
    """The work of one rank, which is the same for all of them.

    Args:
        name: the experiment's or the script's, from which the job's name is made.
        words: the words after the interpreter. They begin with a script or with `-m`.
        environment: further variables for the ranks; no secrets, for anybody may read a job.
        needs_rank_variables: the program may be one that knows only RANK, WORLD_SIZE and the other
            variables of `env://`.
        output: the outputs that the user sees; None if the program prints on rank 0 alone.
        restarts: how often all ranks start again after one was killed.
    """

    name: str
    words: tuple[str, ...]
    environment: Mapping[str, str]
    needs_rank_variables: bool
    output: Output | None
    restarts: int
