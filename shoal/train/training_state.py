"""The state of a training run that changes with each step, and what a checkpoint holds of it.

state of `Run`     weights, optimizer, position in the data, random numbers
here               steps, training time, totals since the last log line, moving average, reports
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shoal.checkpoint import Saved
from shoal.run import Run
from shoal.strategies.base import TOTALS_LENGTH
from shoal.train.run_saver import Report, State
from shoal.train.task import Task


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


class TrainingState:
    """The state of one run beside that of `Run`, on one rank.

    Args:
        run: after `prepare`.
        ema_decay: decay of the moving average of the weights; None or 0 for no average.

    Attributes:
        step: optimizer steps since the beginning of the run, over all of its processes.
        sums: float64 totals of the steps since the last log line, (TOTALS_LENGTH,).
        ema: the moving average; None if there is none.
        watch: time of training, over all processes of the run.
        final: report of the last evaluation.
    """

    def __init__(self, run: Run, ema_decay: float | None) -> None:
        self._run = run
        self.step = 0
        self.watch = Stopwatch()
        self.sums = torch.zeros(TOTALS_LENGTH, dtype=torch.float64, device=run.device)
        self.ema = run.ema(ema_decay) if ema_decay else None
        self.final: dict[str, Any] | None = None
        self._interval_samples = 0
        self._interval_start_s = 0.0

    def count_step(self, samples: int) -> None:
        """Count a step that was taken, on so many samples over all ranks."""
        run = self._run
        if self.ema is not None:
            self.ema.update()
        self.step += 1
        assert run.totals is not None
        if run.finite:  # else one step would hide the loss of the others
            self.sums += run.totals
        self._interval_samples += samples

    def begin_interval(self) -> None:
        """Measure speed from now on. The sums stay: a resumed run logs those of the run before."""
        self._interval_samples = 0
        self._interval_start_s = self.watch.seconds

    def end_interval(self, task: Task) -> dict[str, float]:
        """Return the measures of the steps since the last log line, and begin the next interval.

        The loss is NaN if all steps were skipped. A step waits for the device only here: `tolist`
        copies the sums to the CPU.
        """
        loss, count, _, hits, predictions, *_ = self.sums.tolist()
        self.sums.zero_()
        seconds = max(self.watch.seconds - self._interval_start_s, 1e-9)
        samples_per_s = self._interval_samples / seconds
        self.begin_interval()
        report = task.training_report(loss / count if count else math.nan, hits, predictions)
        return {**report, "samples_per_s": samples_per_s}

    def synchronize(self) -> None:
        """Give all ranks the same weights. Collective.

        If they differed, all ranks take rank 0's sums too: those are logged.
        """
        if self._run.synchronize():
            self._run.mesh.broadcast_tensor(self.sums)

    def collect(self, best: Report | None) -> State:
        """Return what a checkpoint holds, the state of `Run` included. Collective.

        Args:
            best: report of the best evaluation so far.

        Raises:
            TrainingDiverged: the weights are not finite.
        """
        tensors, info, private = self._run.state(copies=False)
        tensors |= {"sums": self.sums}
        info |= {
            "step": self.step,
            "time_s": self.watch.seconds,
            "final": self.final,
            "best": best,
        }
        return tensors, info, private

    def load(self, saved: Saved, accept_data: bool) -> list[str]:
        """Load what `collect` returned. Return notes for the log. Collective.

        Args:
            accept_data: go on with other data than the run had.
        """
        notes = self._run.load_state(saved.tensors, saved.info, saved.private, accept_data)
        self.sums.copy_(saved.tensors["sums"])
        self.step = saved.step
        self.watch = Stopwatch(saved.info["time_s"])
        self.final = saved.info["final"]
        return notes
