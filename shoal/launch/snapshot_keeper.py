"""A program that removes a directory once nobody shares the lock on it any more.

    python snapshot_keeper.py DIRECTORY

`snapshot_memory` starts it, so that a launcher that is killed leaves nothing in memory. It imports
nothing of Shoal, so that it starts fast and stays small.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys


def keep(directory: str) -> None:
    """Wait until all processes that share the lock on `directory` have ended, and remove it."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # it was removed already
        return
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    keep(sys.argv[1])
