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
from multiprocessing.process import BaseProcess

from shoal.launch.hosts.lease import clock_s
from shoal.launch.rank import end_with_parent
from shoal.launch.start import Context

TIME = struct.Struct("<d")
# The watcher looks so often. The agent itself comes first unless it is stopped.
LOOK_S = 0.2
AGENT_FIRST_S = 0.3


class LeaseWord:
    """The end of the lease in shared memory, for the watcher."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("shoal-lease")
        os.ftruncate(self._descriptor, mmap.PAGESIZE)
        self._memory = mmap.mmap(self._descriptor, mmap.PAGESIZE)
        self.write(float("inf"))
        self._process: BaseProcess | None = None

    def write(self, until_s: float) -> None:
        """Set the end of the lease, on `clock_s`."""
        TIME.pack_into(self._memory, 0, until_s)

    def watch(self, context: Context) -> None:
        """Start the watcher, unless it runs. Wait until a process of the context can start."""
        if self._process is None or not self._process.is_alive():
            path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
            self._process = context.Process(target=watch, args=(path, os.getpid()))
            self._process.start()


def watch(path: str, agent: int) -> None:
    """Kill the agent once its lease is over; end when the agent ends."""
    end_with_parent()
    descriptor = os.open(path, os.O_RDONLY)
    memory = mmap.mmap(descriptor, mmap.PAGESIZE, prot=mmap.PROT_READ)
    while clock_s() < TIME.unpack_from(memory, 0)[0] + AGENT_FIRST_S:
        time.sleep(LOOK_S)
    with contextlib.suppress(ProcessLookupError):
        os.kill(agent, signal.SIGKILL)
