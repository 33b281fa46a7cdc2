"""Time spent training: evaluations and saves do not count."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Runs from the start. Args: before_s: what earlier processes of the same run have spent."""

    def __init__(self, before_s: float = 0.0) -> None:
        self._offset_s = before_s - time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() + self._offset_s

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """What happens inside takes no time."""
        before_s = self.seconds
        try:
            yield
        finally:
            self._offset_s += before_s - self.seconds
