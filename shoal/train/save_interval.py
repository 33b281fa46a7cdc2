"""The steps between checkpoints, also where `checkpoint.every_steps` is auto.

auto    a save after step 10 ──> rank 0: K by Daly's formula ──> all ranks ──> K steps, a save ...

Rank 0 measures how long training stands still for a save: for all of one that is written at once;
for the copy of one in the background, and the wait for the one before.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from shoal.comm.axis import Axis
from shoal.config.job import CheckpointConfig
from shoal.costs.cluster import read_time
from shoal.costs.goodput import daly_steps
from shoal.planner.quantity_text import seconds_text

FIRST_STEPS = 10
"""Steps to the first save of auto, which is measured."""
TOLERANCE = 0.2
"""Change of the interval that is worth it: so near to the best one, hardly more is lost."""


class SaveInterval:
    """Says after which steps a checkpoint is due: the same ones on every rank.

    Args:
        settings: all methods but `is_due` do nothing unless `every_steps` is auto.
        mesh: all ranks.
        announce: prints a line; called on rank 0 only.
        training_s: returns the time of training so far, without saves and evaluations.
        clock: monotonic, in seconds.
    """

    def __init__(
        self,
        settings: CheckpointConfig,
        mesh: Axis,
        announce: Callable[[str], None],
        training_s: Callable[[], float],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._steps = FIRST_STEPS
        self._settings = settings
        self._is_auto = settings.every_steps == "auto"
        self._mesh = mesh
        self._announce = announce
        self._training_s = training_s
        self._clock = clock
        self._last_step = 0
        # Step and time of training after the first step of this process, which compiles.
        self._start: tuple[int, float] | None = None
        self._step_s = 0.0
        self._save_start_s = 0.0
        self._saves_s: list[float] = []
        self._is_announced = False

    def resume(self, step: int, steps: int | None) -> None:
        """Go on from a checkpoint, by the interval that it holds; None if it holds none."""
        self._last_step = step
        self._steps = steps or FIRST_STEPS

    def info(self) -> dict[str, int]:
        """Return what a checkpoint holds of the interval."""
        return {"save_interval": self._steps} if self._is_auto else {}

    def is_due(self, step: int) -> bool:
        """Return True if a checkpoint is due after this step."""
        every = self._settings.every_steps
        if every == "auto":
            return step >= self._last_step + self._steps
        return every is not None and step % every == 0

    def after_step(self, step: int) -> None:
        """Measure the steps after this one, if it is the first one."""
        if self._start is None:
            self._start = step, self._training_s()

    def begin_save(self, step: int) -> None:
        """Measure the steps before a save, and begin to measure it."""
        self._last_step = step
        if not self._is_auto or self._start is None:
            return
        if self._mesh.device.type == "cuda":  # else the save would seem to take the last steps
            torch.cuda.synchronize(self._mesh.device)
        if step > self._start[0]:
            self._step_s = (self._training_s() - self._start[1]) / (step - self._start[0])
        self._save_start_s = self._clock()

    def end_save(self) -> None:
        """Measure a save that has succeeded, and choose the interval anew. Collective."""
        if not self._is_auto:
            return
        self._saves_s.append(self._clock() - self._save_start_s)
        choice = self._choose() if self._mesh.rank == 0 else 0
        self._steps = int(self._mesh.sum_of_host_numbers([choice])[0])

    def _choose(self) -> int:
        """Return the interval by all measurements, and print it where it is a new one."""
        if not self._step_s:
            return self._steps
        save_s = sum(self._saves_s) / len(self._saves_s)
        best = daly_steps(read_time(self._settings.job_mtbf), save_s, self._step_s)
        if self._is_announced and abs(best - self._steps) <= TOLERANCE * self._steps:
            return self._steps
        self._is_announced = True
        self._announce(
            f"checkpoint.every_steps auto: every {best:,} steps (Daly: a save takes "
            f"{seconds_text(save_s)}, a step {seconds_text(self._step_s)}, the job's mean time "
            f"between failures {self._settings.job_mtbf})"
        )
        return best
