"""The processes of a verb: this one, new ones on this machine, or those that a launcher started."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.launch.rank_info import RankInfo


def rank_info(processes: int | None) -> RankInfo:
    """Return this process's place in its world.

    Args:
        processes: the value of -n; None where it is not given.

    Raises:
        UsageError: `processes` is below 1.
        EnvironmentConflict: a launcher has started another number of processes.
    """
    from shoal.launch.environment import own_place, read

    if processes is not None and processes < 1:
        raise UsageError(f"-n {processes}: at least one process is needed")
    info = own_place()
    if processes is None or info.launcher == "single":
        return info
    return read({**os.environ, "SHOAL_EXPECTED_WORLD": str(processes)})


def call(world: int, ranks: int, function: str, arguments: tuple[object, ...]) -> int:
    """Call a function of shoal.train.entry in every rank.

    Args:
        world: the ranks that a launcher has started, this process among them; 1 for none.
        ranks: the ranks of the run. If they are more than `world`, they start on this machine.
        function: the name of the function.
        arguments: its arguments, plain data.

    Returns:
        The exit code.
    """
    if world == 1 and ranks > 1:
        from shoal.launch.local import run
        from shoal.train import entry

        target = getattr(entry, function)
        return run(target, arguments, ranks, preload=entry.PRELOAD, torch_store=False)
    from shoal.train import entry

    getattr(entry, function)(*arguments)
    return 0
