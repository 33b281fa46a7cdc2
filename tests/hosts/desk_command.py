"""`shoal` as a program on the desk of real hosts, in the directory that all hosts see."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from namespaces import Hosts

END_S = 120.0


class DeskCommand:
    """A running `shoal`. As a context, it is killed in the end."""

    def __init__(self, hosts: Hosts, *words: str, **variables: str) -> None:
        self._desk = hosts.desk
        self._line = "\0".join(["-m", "shoal", words[0], ""]).encode()
        program = [sys.executable, "-m", "shoal", *words]
        self.process: subprocess.Popen[Any] = hosts.start(
            hosts.desk,
            ["sh", "-c", 'cd "$0" && exec "$@"', str(hosts.shared), *program],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> DeskCommand:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def end(self) -> tuple[int, str, str]:
        """Wait for its end, and return exit code, stdout and stderr."""
        stdout, stderr = self.process.communicate(timeout=END_S)
        return self.process.returncode, stdout, stderr

    def signal(self, number: int) -> None:
        """Send a signal to the command itself, not to what entered the desk for it."""
        for pid in self._desk.pids() - self._desk.first_pids:
            with contextlib.suppress(OSError):
                if self._line in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, number)
                    return
        raise AssertionError("there is no such command")


def ended(hosts: Hosts, *words: str, **variables: str) -> tuple[int, str, str]:
    """Run a command to its end, and return exit code, stdout and stderr."""
    with DeskCommand(hosts, *words, **variables) as command:
        return command.end()
