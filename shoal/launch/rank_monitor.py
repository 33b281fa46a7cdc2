"""The watchdog's body in the launcher: it reads words and the clock for the detectors."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from shoal.launch import hang_report
from shoal.launch.failure import Failure
from shoal.launch.progress_source import SECONDS_BETWEEN_LOOKS, ProgressSource
from shoal.watchdog.hang_detector import HangDetector
from shoal.watchdog.straggler_detector import StragglerDetector

EXIT_HANG = 124
"""Exit code of a launcher whose run has ended because of a hang; that of `timeout`."""


class RankMonitor:
    """Looks at the ranks of one start once a second.

    Args:
        source: the progress of the ranks.
        tell: is given the report of a hang, and notes of slow ranks.
    """

    def __init__(self, source: ProgressSource, tell: Callable[[str], None] | None = None) -> None:
        self._source = source
        self._tell = tell or print_to_stderr
        limit_s = source.hang_limit_s
        self._hangs = HangDetector(limit_s) if limit_s > 0 else None
        self._stragglers = StragglerDetector()
        self._next_s = 0.0

    def poll(self) -> list[Failure]:
        """Return the failure of a rank that does not come; tell of it, and of slow ranks."""
        if self._hangs is None or time.monotonic() < self._next_s:
            return []
        self._next_s = time.monotonic() + SECONDS_BETWEEN_LOOKS
        look = self._source.look()
        for slow in self._stragglers.look(look.progress):
            self._source.name_slow(slow.rank)
            told = slow.describe(self._source.world, self._source.host(slow.rank))
            self._tell(f"note: {told}")
        hang = self._hangs.look(look.progress, look.passed_s, paused=bool(look.halt))
        if hang is None:
            return []
        self._tell(hang_report.report(hang, self._source))
        text = hang_report.headline(hang, self._source)
        return [Failure(hang.late, time.monotonic(), text, "", False, code=EXIT_HANG, is_loss=True)]


def print_to_stderr(text: str) -> None:
    """Print a text on a line of its own."""
    begin = "\n" if sys.stderr.isatty() else ""
    print(f"{begin}{text}", file=sys.stderr, flush=True)
