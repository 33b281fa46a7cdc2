"""Checkpoints of one run for its loop: saved at once or in the background, and the best one.

save ──> written at once                      ──┐
     └─> copied, then written by a thread ──> wait ──> saved_step, best; or a note

A run may have a fast directory besides, such as one in /dev/shm:

    every K steps   state ──> FAST_DIR/shoal-<digest>/checkpoints/step-00000012; the newest stays
    a start         the newer of the newest good checkpoint there and in the run directory

These saves have the protocol of a checkpoint too. They go when the run ends by itself, and stay
after a kill, for the next start.

`checkpoint.every_steps` may be auto:

    a save after step 10 ──> rank 0: K by Daly's formula ──> all ranks ──> K steps, a save ...

Rank 0 measures how long training stands still for a save: for all of one that is written at once;
for the copy of one in the background, and the wait for the one before.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.checkpoint import AsyncSaver, Checkpoints, Saved, tensor_files
from shoal.comm.axis import Axis
from shoal.config.job import CheckpointConfig
from shoal.costs.cluster import read_time
from shoal.costs.goodput import daly_steps
from shoal.errors import CheckpointError, CleanupFailed, ConfigError
from shoal.platform.ownership import untrusted_reason
from shoal.platform.quantity_text import seconds_text
from shoal.train.run_directory import check_shared, fast_directory, last_saved, name_fast_directory

if TYPE_CHECKING:
    from shoal.train.loop import Training

State = tuple[Mapping[str, Tensor], Mapping[str, Any], Mapping[str, Tensor]]
"""(tensors, info, private), as `Run.state` returns them."""
Report = Mapping[str, Any]

RETRY_S = 5
"""Seconds between tries of a last save."""
FIRST_STEPS = 10
"""Steps to the first save of auto, which is measured."""
TOLERANCE = 0.2
"""Change of the interval that is worth it: so near to the best one, hardly more is lost."""


class RunSaver:
    """Saves a run, and turns a save that failed into a note, so that training goes on.

    Args:
        training: whose state is saved.
        async_saver: writes in the background; None to write at once.
        retry_s: seconds in which a save that must succeed is tried again.

    Attributes:
        in_flight: step of the save in the background; -1 if there is none.
        saved_step: step of the last save that succeeded; -1 before.
        best: report of the best evaluation so far. If the save of its checkpoint fails, it is the
            one before again, because the best one must be one that can be loaded.
    """

    def __init__(
        self,
        training: Training,
        checkpoints: Checkpoints,
        async_saver: AsyncSaver | None = None,
        retry_s: int = 0,
    ) -> None:
        self._training = training
        self._retry_s = retry_s
        self.in_flight = -1
        self.saved_step = -1
        self.best: Report | None = None
        self._best_saved: Report | None = None
        self.checkpoints = checkpoints
        self._async_saver = async_saver

    def resume(self, step: int | None, best: Report | None) -> None:
        """Go on from a checkpoint, and finish a cleanup that a kill has prevented. Collective.

        Args:
            step: None if it is not one of these checkpoints.

        Raises:
            CleanupFailed: on every rank; training may go on.
        """
        self.best = best
        self._best_saved = best
        if step is not None:
            self.checkpoints.complete(step, None if best is None else best["step"])

    def save(self, step: int, state: State, is_best: bool, must_succeed: bool) -> None:
        """Save the state of `step`. Collective; call it after `wait`.

        Args:
            must_succeed: save at once, and raise if it fails.

        Raises:
            CheckpointError: on every rank, if `must_succeed`.
        """
        if must_succeed:
            self._complete(step, lambda: self._insist(step, state, is_best), must_succeed)
        elif self._async_saver is None:
            self._complete(step, lambda: self.checkpoints.save(step, *state, is_best))
        else:
            saver = self._async_saver
            if self._attempt(lambda: saver.start(step, *state, is_best)):
                self.in_flight = step

    def _insist(self, step: int, state: State, is_best: bool) -> None:
        """Try the last save again for a while. Collective."""
        last = self._retry_s // RETRY_S
        for attempt in range(last + 1):
            try:
                self.checkpoints.save(step, *state, is_best)
                return
            except CleanupFailed:
                raise
            except CheckpointError as error:
                if attempt == last:
                    raise
                if attempt == 0:
                    self._training.log.note(
                        f"{error}; this is the last save: make room, it is tried again for "
                        f"{self._retry_s} s"
                    )
            time.sleep(RETRY_S)

    def skip(self) -> None:
        """Save nothing at this step: the best checkpoint is the one before again."""
        self.best = self._best_saved

    def wait(self) -> None:
        """Wait for the save in the background, and note how it ended. Collective."""
        if self._async_saver is None or self.in_flight < 0:
            return
        step = self.in_flight
        self.in_flight = -1
        self._complete(step, self._async_saver.wait)

    def wait_for_best(self) -> None:
        """Wait for a save in the background of the best checkpoint so far. Collective.

        Until it has succeeded, nothing else that is saved may name it as the best one.
        """
        if self.best is not self._best_saved:
            self.wait()

    def _complete(
        self, step: int, action: Callable[[], object], must_succeed: bool = False
    ) -> None:
        """Run `action`, which ends a save.

        `best` is still the one of the time when the save began: it changes only after `wait`.
        """
        if self._attempt(action, must_succeed):
            self.saved_step = step
            self._best_saved = self.best

    def _attempt(self, action: Callable[[], object], must_succeed: bool = False) -> bool:
        """Run `action`. Return True if it succeeded; else note why, or raise."""
        try:
            with self._training.pause("saving"):
                action()
        except CleanupFailed as error:
            self._training.log.note(
                f"{error}; the next save, or the same command again, makes up for it"
            )
        except CheckpointError as error:
            if must_succeed:
                raise
            self._training.log.note(f"{error}; training goes on")
            self.best = self._best_saved
            return False
        return True

    def close(self) -> None:
        """End the thread. If training ends by an error, note how the save in flight has ended."""
        error = None if self._async_saver is None else self._async_saver.close()
        if isinstance(error, CheckpointError):
            self._training.log.note(str(error))
        elif error is not None:  # for example because another rank is gone
            self._training.log.note(
                f"the save of step {self.in_flight} did not end: {type(error).__name__}: {error}"
            )


def open_fast_saver(training: Training) -> RunSaver | None:
    """Return the saver of a job's fast directory, if it has one. Collective, with the lock held.

    Raises:
        ConfigError: on every rank; the directory cannot be written, or hosts do not share it.
    """
    job, mesh = training.job, training.run.mesh
    if job.checkpoint.fast_dir is None:
        return None
    path, problem = "", ""
    if mesh.rank == 0:
        try:
            name_fast_directory(job)
            made = fast_directory(job.directory, job.checkpoint.fast_dir)
            assert made is not None
            if not job.checkpoint.resume:
                shutil.rmtree(made, ignore_errors=True)
            made.mkdir(mode=0o700, parents=True, exist_ok=True)
            path, problem = str(made), untrusted_reason(made) or ""
        except OSError as error:
            problem = f"{job.checkpoint.fast_dir} cannot be written: {error.strerror or error}"
    if problem := mesh.broadcast_str(problem):
        raise ConfigError(f"checkpoint.fast_dir: {problem}. Choose another one.")
    path = mesh.broadcast_str(path)
    check_shared(mesh, path, "checkpoint.fast_dir")
    # One checkpoint stays; while another is written, there are two.
    return RunSaver(training, Checkpoints(Path(path, "checkpoints"), keep=1))


def load_newest(
    checkpoints: Checkpoints,
    fast: RunSaver | None,
    report: Callable[[str], None],
    like: tensor_files.LayoutLookup,
) -> tuple[Saved | None, bool]:
    """Load the newest good checkpoint of the run directory or of the fast one. Collective.

    Args: report, like: as of `Checkpoints.load`.

    Returns: the checkpoint, None if there is none; and True if it was in the fast directory.
    Raises:
        CheckpointError: on every rank; nothing could be loaded, and the run directory has
            checkpoints.
    """
    stores = [checkpoints] if fast is None else [checkpoints, fast.checkpoints]
    steps = {store.directory: _last_step(store) for store in stores}
    newest, is_fast = None, False
    failures: dict[bool, CheckpointError] = {}  # True: of the run directory
    for store in sorted(stores, key=lambda store: -steps[store.directory]):
        if newest is not None and newest.step >= steps[store.directory]:
            break
        try:
            saved = store.load(report, like=like)
        except CheckpointError as error:
            failures[store is checkpoints] = error
            continue
        if saved is not None and (newest is None or saved.step > newest.step):
            newest, is_fast = saved, store is not checkpoints
    if newest is None and True in failures:
        raise failures[True]
    for failure in failures.values():
        report(str(failure))
    return newest, is_fast


def _last_step(store: Checkpoints) -> int:
    """Return the step of the newest checkpoint of a directory by its name, as rank 0 sees it."""
    step = last_saved(str(store.directory.parent))
    steps: list[int] = store.consensus.all_gather_objects(-1 if step is None else step)
    return steps[0]


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
