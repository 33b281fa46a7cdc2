"""Facts about processes and the kernel that Linux tells under /proc."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")


def process_state(pid: int) -> str | None:
    """Return the letter of a process's state; None when there is no such process, or no /proc.

    R runs, S and D sleep, T is stopped by a signal, t by a debugger, Z has ended and was not waited
    for. Source: proc_pid_stat(5). The name before the state stands in parentheses and may hold any
    character.
    """
    with suppress(OSError, IndexError):
        return (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    return None


def boot_id() -> str:
    """Return the text that the kernel drew at random when it started: alike for containers of one
    host.

    Empty where the system does not tell.
    """
    with suppress(OSError):
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    return ""
