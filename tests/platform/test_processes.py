"""Facts from /proc, of real processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from shoal.platform.processes import boot_id, process_state

STOPS = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"]


def test_a_process_that_runs_is_told_from_one_that_is_stopped_and_from_one_that_has_ended() -> None:
    assert process_state(os.getpid()) == "R"
    child = subprocess.Popen(STOPS)
    try:
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        assert process_state(child.pid) == "T"
        child.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process_state(child.pid) == "Z"
    finally:
        child.kill()
        child.wait()
    assert process_state(child.pid) is None


def test_a_name_with_parentheses_and_spaces_does_not_mislead(tmp_path: Path) -> None:
    shell = tmp_path / "a) Z (b"
    shutil.copy("/bin/sh", shell)
    child = subprocess.Popen([shell, "-c", "kill -STOP $$"])
    try:
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        assert process_state(child.pid) == "T"
    finally:
        child.kill()
        child.wait()


def test_two_processes_of_one_kernel_read_the_same_boot_id() -> None:
    read = "from shoal.platform.processes import boot_id; print(boot_id())"
    found = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, check=True)
    assert boot_id()
    assert found.stdout.strip() == boot_id()
