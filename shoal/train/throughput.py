"""Time of a run: what it has spent on training, its speed, and when it will end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MEMORY_S = 20.0
"""Age at which a step weighs 1/e in the running means, in seconds."""
REFRESH_S = 0.25


class Stopwatch:
    """Measures the time of training, without evaluations and saves. It starts when it is made.

    Args:
        before_s: time that earlier processes of the same run have measured.
    """

    def __init__(self, before_s: float = 0.0) -> None:
        self._offset_s = before_s - time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() + self._offset_s

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Stop the watch in this context."""
        before_s = self.seconds
        try:
            yield
        finally:
            self._offset_s += before_s - self.seconds


class Throughput:
    """Running means of the time of steps, weighted towards the last seconds, without pauses.

    Args:
        total_steps: optimizer steps of the run.
        done_steps: steps of it that an earlier process took.
        clock: monotonic, in seconds.
    """

    def __init__(
        self, total_steps: int, done_steps: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._remaining = total_steps - done_steps
        # Since the last update of the means:
        self._new_steps = 0
        self._new_samples = 0
        # Decaying sums; the means are their quotients:
        self._steps = 0.0
        self._samples = 0.0
        self._time_s = 0.0
        self._steps_here = 0  # of this process
        self._pauses_s = 0.0
        self._pause_s_per_step = 0.0
        self._started = clock()
        # None until the first step, which is not counted: it compiles and allocates.
        self._updated: float | None = None
        self._next_refresh = 0.0

    def step(self, samples: int) -> bool:
        """Count one step of so many samples. Return True if the display should be refreshed.

        A call costs less than a microsecond, so that it may be made in every step.
        """
        self._new_steps += 1
        self._new_samples += samples
        now = self._clock()
        if now < self._next_refresh:
            return False
        self._next_refresh = now + REFRESH_S
        self._update(now)
        return True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count the time in this context for the end of the run, but not for the speed."""
        start = self._clock()
        self._update(start)
        try:
            yield
        finally:
            self._updated = self._clock()
            self._pauses_s += self._updated - start
            # Divided by the steps so far: evaluations and saves come again after equal intervals.
            self._pause_s_per_step = self._pauses_s / max(1, self._steps_here)

    @property
    def passed_s(self) -> float:
        """Seconds since this process began, pauses included."""
        return self._clock() - self._started

    @property
    def samples_per_s(self) -> float | None:
        """Speed of training, without pauses; None before the second step."""
        return self._samples / self._time_s if self._time_s > 0 else None

    @property
    def remaining_s(self) -> float | None:
        """Seconds to the end of the run, pauses included; None before the second step."""
        if not self._time_s or not self._steps:
            return None
        remaining_steps = max(0, self._remaining - self._new_steps)
        return remaining_steps * (self._time_s / self._steps + self._pause_s_per_step)

    def _update(self, now: float) -> None:
        if not self._new_steps:
            return
        if self._updated is not None:
            passed_s = now - self._updated
            memory = math.exp(-passed_s / MEMORY_S)
            self._steps = memory * self._steps + self._new_steps
            self._samples = memory * self._samples + self._new_samples
            self._time_s = memory * self._time_s + passed_s
        self._remaining -= self._new_steps
        self._steps_here += self._new_steps
        self._new_steps = 0
        self._new_samples = 0
        self._updated = now
