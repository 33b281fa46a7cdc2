"""Wait for the end of a process that another process collects."""

import time
from pathlib import Path


def wait_for_the_end(pid: int, limit_s: float) -> None:
    """Wait until a process has ended. Raises AssertionError at the limit."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except OSError:
            return
        time.sleep(0.01)
    raise AssertionError("a rank hangs")
