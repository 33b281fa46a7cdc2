"""The processes below one process, found by parentage alone, and the end of all of them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

END_S = 5.0


def children(pid: int) -> list[int]:
    """Return the children of all threads of a process; [] for one that has ended."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, task.read_text().split())
        except OSError:  # the thread has ended
            continue
    return found


def descendants(pid: int) -> list[int]:
    """Return all live processes below `pid`, parents first; zombies are left out."""
    found: list[int] = []
    for child in children(pid):
        if command_of(child) is not None:
            found.append(child)
        found += descendants(child)
    return found


def command_of(pid: int) -> str | None:
    """Return the command line of a process, or None if it has ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return None
    return words.replace(b"\0", b" ").decode(errors="replace").strip() or None


def marked(variable: str) -> list[int]:
    """Return the live processes that have `variable`, NAME=VALUE, among theirs: all descendants of
    a program that got it, in whatever session; zombies are left out.
    """
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if variable.encode() in (path / "environ").read_bytes() and command_of(int(path.name)):
                found.append(int(path.name))
    return found


def test_of(pid: int) -> str:
    """Return the test that was running when a program was started; "" where nobody knows."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    name = b"PYTEST_CURRENT_TEST="
    found = [value[len(name) :].decode() for value in variables if value.startswith(name)]
    return found[0] if found else ""


def reap_orphans(own: Collection[int] = ()) -> None:
    """Take the exit codes of ended processes that this one has adopted.

    Args: own: children that this process started and waits for itself.
    """
    for child in children(os.getpid()):
        if child not in own:
            try:
                os.waitpid(child, os.WNOHANG)
            except ChildProcessError:
                continue


def end(pids: list[int]) -> None:
    """Kill these processes and all below them, with the process groups that they lead."""
    everyone = {below for pid in pids for below in (pid, *descendants(pid))}
    for pid in everyone:
        try:
            if os.getpgid(pid) == pid:
                os.killpg(pid, signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    limit_s = time.monotonic() + END_S
    while time.monotonic() < limit_s and any(command_of(pid) for pid in everyone):
        reap_orphans()
        time.sleep(0.02)
