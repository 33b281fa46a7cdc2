"""Facts about processes and the kernel, and what a process is called, in Linux's /proc."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>


def process_state(pid: int) -> str | None:
    """Return the letter of a process's state; None when there is no such process, or no /proc.

    R runs, S and D sleep, T is stopped by a signal, t by a debugger, Z is a zombie. Source:
    proc_pid_stat(5). The name before the state is in parentheses and may contain any character, so
    the last parenthesis is searched.
    """
    with suppress(OSError, IndexError):
        return (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    return None


def boot_id() -> str:
    """Return the kernel's random boot id, the same in all containers of one host.

    Empty where the system has none.
    """
    with suppress(OSError):
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    return ""


def host_id(*namespaces: str) -> str:
    """Return a text that is the same on one host, for processes in the same namespaces of these.

    SHOAL_HOST in the environment replaces it.
    """
    if name := os.environ.get("SHOAL_HOST"):
        return name
    words = [socket.gethostname(), boot_id()]
    for namespace in namespaces:
        with suppress(OSError):
            words.append(os.readlink(f"/proc/self/ns/{namespace}"))
    return " ".join(words)


def set_process_name(name: str) -> None:
    """Set the name of this process that ps, top and pgrep show: 15 letters. Linux only."""
    with suppress(OSError):
        (PROC / "self/comm").write_text(name)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose parents end, so that none escapes. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def kill_descendants(limit_s: float) -> None:
    """Kill all processes below this one, also those in sessions of their own. Linux only.

    Args:
        limit_s: stop trying after so long; a process in the kernel's uninterruptible sleep stays.
    """
    deadline_s = time.monotonic() + limit_s
    while (pids := _descendants(os.getpid())) and time.monotonic() < deadline_s:
        for pid in pids:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def _descendants(root: int) -> list[int]:
    """Return the processes below `root` that are not zombies of somebody else."""
    parents: dict[int, int] = {}
    for path in PROC.glob("[0-9]*/stat"):
        with suppress(OSError, IndexError, ValueError):
            state, parent = path.read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state != "Z" or int(parent) == root:
                parents[int(path.parent.name)] = int(parent)
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]
