"""Where a verb runs: in this process, in processes of this machine, or in a world that a
launcher has made.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.launch.rank_info import RankInfo


def rank_info(processes: int | None) -> RankInfo:
    """This process's place in its world. Where a launcher made the world, it must be of the
    size that was asked for.
    """
    from shoal.launch.environment import read

    if processes is not None and processes < 1:
        raise UsageError(f"-n {processes}: at least one process is needed")
    found = read(os.environ)
    if processes is None or found.launcher == "single":
        return found
    return read({**os.environ, "SHOAL_EXPECTED_WORLD": str(processes)})


def call(world: int, ranks: int, function: str, arguments: tuple[object, ...]) -> int:
    """Call a function of shoal.train.entry in every rank: here, or in processes of this machine."""
    if world == 1 and ranks > 1:
        from shoal.launch.local import run
        from shoal.launch.preload import TRAINING
        from shoal.train import entry

        preload = (*TRAINING, "torch.distributed.checkpoint", "shoal.train.loop")
        return run(getattr(entry, function), arguments, ranks, preload=preload)
    from shoal.train import entry

    getattr(entry, function)(*arguments)
    return 0
