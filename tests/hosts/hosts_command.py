"""Commands with --hosts as programs of their own, on hosts that `fake_ssh.py` makes of this one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.harness.process_tree import command_of, marked
from tests.harness.waiting import until

ROOT = Path(__file__).parents[2]
FAKE_SSH = Path(__file__).with_name("fake_ssh.py")
MARK = "HOSTS_TEST_MARK"
LIMIT_S = 120.0


class HostsCommand:
    """A running `shoal` with hosts. All processes that it starts have a mark in their variables."""

    def __init__(self, folder: Path, words: Sequence[str], variables: dict[str, str]) -> None:
        self.mark = uuid.uuid4().hex
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = {
            **os.environ,
            MARK: self.mark,
            "PYTHONPATH": path.rstrip(os.pathsep),
            "SHOAL_SSH": f"{sys.executable} {FAKE_SSH}",
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shoal", *words],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def end(self) -> tuple[int, str, str]:
        """Wait for its end, and return exit code, stdout and stderr."""
        stdout, stderr = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, stdout, stderr

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def others(self, *words: str) -> list[int]:
        """Return its processes but the command itself; those with all `words` in the command."""
        pids = [pid for pid in marked(f"{MARK}={self.mark}") if pid != self.process.pid]
        return [pid for pid in pids if all(word in (command_of(pid) or "") for word in words)]

    def agent(self, host: str) -> int:
        """Return the process of a host's agent."""
        for pid in self.others("shoal agent"):
            if f"SHOAL_HOST={host}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                return pid
        raise AssertionError(f"{host} has no agent")


@contextmanager
def hosts_command(folder: Path, *words: str, **variables: str) -> Iterator[HostsCommand]:
    """Run `shoal` with `words` in a folder; kill what is left of it in the end."""
    command = HostsCommand(folder, words, variables)
    try:
        yield command
    finally:
        command.process.kill()
        command.process.wait()
        until(lambda: not kill(command.others()))
        for stream in (command.process.stdout, command.process.stderr):
            assert stream is not None
            stream.close()


def kill(pids: Sequence[int]) -> Sequence[int]:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return pids
