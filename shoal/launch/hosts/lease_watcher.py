"""A process that kills an agent whose lease is over, where the agent cannot end itself.

An agent that is stopped (SIGSTOP, a debugger) or swapped out does not see that its lease ends, and
its ranks would train on while the driver starts others. SIGKILL reaches a stopped process, and the
kernel then kills all ranks of the agent (see `launch.rank`).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import struct
import time
from multiprocessing.context import BaseContext

from shoal.launch.hosts.lease import clock_s

TIME = struct.Struct("<d")
# The watcher looks so often. The agent itself comes first unless it is stopped.
LOOK_S = 0.2
AGENT_FIRST_S = 0.3


class LeaseWord:
    """The end of the lease in shared memory, for the watcher.

    Args:
        context: of the processes that the agent starts.
    """

    def __init__(self, context: BaseContext) -> None:
        self._descriptor = os.memfd_create("shoal-lease")
        os.ftruncate(self._descriptor, mmap.PAGESIZE)
        self._memory = mmap.mmap(self._descriptor, mmap.PAGESIZE)
        path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self.write(float("inf"))
        # Not Process of the context's type: BaseContext does not declare one.
        self._process = context.Process(  # type: ignore[attr-defined]
            target=watch, args=(path, os.getpid()), name="lease watcher"
        )
        self._process.start()

    def write(self, until_s: float) -> None:
        """Set the end of the lease, on `clock_s`."""
        TIME.pack_into(self._memory, 0, until_s)


def watch(path: str, agent: int) -> None:
    """Kill the agent once its lease is over; end when the agent ends."""
    from shoal.launch.rank import end_with_parent

    end_with_parent()
    descriptor = os.open(path, os.O_RDONLY)
    memory = mmap.mmap(descriptor, mmap.PAGESIZE, prot=mmap.PROT_READ)
    while clock_s() < TIME.unpack_from(memory, 0)[0] + AGENT_FIRST_S:
        time.sleep(LOOK_S)
    with contextlib.suppress(ProcessLookupError):
        os.kill(agent, signal.SIGKILL)
