"""The processes of a verb: this one, new ones on this machine, or those that a launcher started."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.launch.rank_info import RankInfo


def rank_info(processes: int | None) -> RankInfo:
    """Return this process's place in its world.

    Args:
        processes: the value of -n; None where it is not given.

    Raises:
        EnvironmentConflict: a launcher has started another number of processes.
    """
    from shoal.launch.environment import own_place, read

    info = own_place()
    if processes is None or info.launcher == "single":
        return info
    return read({**os.environ, "SHOAL_EXPECTED_WORLD": str(processes)})


def call(world: int, ranks: int, target: Callable[..., None], arguments: tuple[object, ...]) -> int:
    """Call a function of shoal.train.entry in every rank, and return the exit code.

    Args:
        world: the ranks that a launcher has started, this process among them; 1 for none.
        ranks: the ranks of the run. If they are more than `world`, they start on this machine.
        target: the function.
        arguments: its arguments, plain data.
    """
    if world == 1 and ranks > 1:
        from shoal.launch.local import run
        from shoal.train.entry import PRELOAD

        return run(target, arguments, ranks, preload=PRELOAD, torch_store=False)
    target(*arguments)
    return 0
