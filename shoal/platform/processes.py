"""Facts about processes and the kernel, read from Linux's /proc."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")


def process_state(pid: int) -> str | None:
    """Return the letter of a process's state; None when there is no such process, or no /proc.

    R runs, S and D sleep, T is stopped by a signal, t by a debugger, Z is a zombie. Source:
    proc_pid_stat(5). The name before the state is in parentheses and may contain any character, so
    the last parenthesis is searched.
    """
    with suppress(OSError, IndexError):
        return (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    return None


def parent_pid(pid: int) -> int | None:
    """Return the process that a process was started by, or was left to; None when unknown."""
    with suppress(OSError, IndexError, ValueError):
        stat = (PROC / str(pid) / "stat").read_text(errors="replace")
        return int(stat.rpartition(")")[2].split()[1])
    return None


def boot_id() -> str:
    """Return the kernel's random boot id, the same in all containers of one host.

    Empty where the system has none.
    """
    with suppress(OSError):
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    return ""
