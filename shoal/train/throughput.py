"""How fast a run goes and when it will end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MEMORY_S = 20.0  # what is this old weighs 1/e in the running means
REFRESH_S = 0.25


class Throughput:
    """Running means of the steps' time, weighted towards the last seconds; pauses are kept apart.

    Args:
        total_steps: optimizer steps of the whole run.
        done_steps: those that an earlier process did.
        clock: seconds, monotonic.
    """

    def __init__(
        self, total_steps: int, done_steps: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._remaining = total_steps - done_steps
        self._new_steps = self._new_samples = 0  # since the last update of the means
        self._steps = self._samples = self._time_s = (
            0.0  # decaying sums; their quotients are the means
        )
        self._own_steps, self._pauses_s, self._pause_s_per_step = 0, 0.0, 0.0
        self._started = clock()
        # The first step warms things up and is not counted: it says nothing about the others.
        self._updated: float | None = None
        self._due = 0.0

    def step(self, samples: int) -> bool:
        """Counts one step of so many samples; whether it is time to show something new. Costs
        below a microsecond.
        """
        self._new_steps += 1
        self._new_samples += samples
        now = self._clock()
        if now < self._due:
            return False
        self._due = now + REFRESH_S
        self._update(now)
        return True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around an evaluation or a checkpoint: its time counts towards the end of the run, not
        towards the speed.
        """
        start = self._clock()
        self._update(start)
        try:
            yield
        finally:
            self._updated = self._clock()
            self._pauses_s += self._updated - start
            # Shared out over the steps so far: pauses come back at their rhythm, whatever it is.
            self._pause_s_per_step = self._pauses_s / max(1, self._own_steps)

    @property
    def passed_s(self) -> float:
        """Since this process began, pauses included."""
        return self._clock() - self._started

    @property
    def samples_per_s(self) -> float | None:
        """Of training alone; None before the second step."""
        return self._samples / self._time_s if self._time_s > 0 else None

    @property
    def remaining_s(self) -> float | None:
        """Until the end of the run, pauses included; None before the second step."""
        if not self._time_s or not self._steps:
            return None
        return max(0, self._remaining - self._new_steps) * (
            self._time_s / self._steps + self._pause_s_per_step
        )

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
        self._own_steps += self._new_steps
        self._new_steps = self._new_samples = 0
        self._updated = now
