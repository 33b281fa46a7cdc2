"""The processes of a verb: this one, or those that a launcher has started."""

from __future__ import annotations

import os
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
