"""A `shoal train` in a process of its own: its steps, and what it says, each line with its time."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
LIMIT_S = 60.0


class WatchedTraining:
    """The command and what it has printed on stderr.

    Args:
        directory: the run directory.
        words: the rest of the command, after `shoal train`.
        environment: variables besides those of this process.
        prefix: words before the command, such as those that enter another host.

    Attributes:
        lines: of stderr, each with the time at which it came.
    """

    def __init__(
        self,
        directory: Path,
        words: Sequence[str],
        environment: Mapping[str, str],
        prefix: Sequence[str] = (),
    ) -> None:
        self.directory = directory
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "shoal", "train", *words, "--out", str(directory)],
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.lines: list[tuple[float, str]] = []
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append((time.monotonic(), line))

    def first(self, pattern: str, known: int = 0) -> tuple[float, str] | None:
        """Return the first line that has the pattern, behind the lines that are known."""
        lines = self.lines[known:]
        return next((line for line in lines if re.search(pattern, line[1])), None)

    def step(self) -> int:
        """Return the last step that is done; 0 before the first."""
        try:
            lines = (self.directory / "metrics.jsonl").read_bytes().splitlines()
            return int(json.loads(lines[-1])["step"])
        except (OSError, ValueError, IndexError):
            return 0

    def saved(self) -> str:
        """Return the name of the newest checkpoint; empty before the first."""
        try:
            return (self.directory / "checkpoints/latest").read_text()
        except OSError:
            return ""

    def until(self, condition: Callable[[], T | None]) -> T:
        """Wait until a condition holds, and return its value."""
        end_s = time.monotonic() + LIMIT_S
        while not (found := condition()):
            if time.monotonic() > end_s or self.process.poll() is not None:
                raise SystemExit(self.text())
            time.sleep(0.002)
        return found

    def resumed(self, known: int) -> tuple[float, int]:
        """Wait until ranks have resumed; return when, and the step from which they go on."""
        resumed_s, line = self.until(lambda: self.first("resumed from", known))
        found = re.search(r"step-(\d+)", line)
        assert found is not None
        return resumed_s, int(found[1])

    def text(self) -> str:
        """Return all that was said."""
        return "".join(line for _, line in self.lines)

    def end(self, number: int) -> int:
        """Send a signal, wait for the end, and return the exit code."""
        self.process.send_signal(number)
        code = self.process.wait()
        self._listener.join(5)
        return code
