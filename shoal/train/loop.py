"""The training loop of a job on one rank. It knows no strategy.

for each epoch
    for each global batch    set the learning rate, forward_backward, clip, optimizer.step
    evaluate                 every sample once
    save                     after the evaluation, which decides if this is the best one
"""

from __future__ import annotations

import math
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

from shoal.checkpoint import AsyncSaver, Checkpoints, Saved, newest
from shoal.config.fields import leaf_settings
from shoal.config.job import Job
from shoal.errors import CleanupFailed, RecordError, TrainingDiverged
from shoal.launch.rank import EXIT_RESTART
from shoal.plotting.curves import plot_or_note
from shoal.run.supervised import supervised
from shoal.train import optimizer as optimizers
from shoal.train.build import build, describe, init_run, steps_of_epochs, take_step
from shoal.train.console import Log, Progress
from shoal.train.record import Record
from shoal.train.run_directory import check_shared, claim_for_all, leave_stop, make_again
from shoal.train.run_saver import RunSaver, SaveInterval, State, load_newest, open_fast_saver
from shoal.train.training_state import TrainingState


def train(job: Job) -> None:
    """Train `job` on this rank, from its newest checkpoint on if there is one. Collective.

    Raises: SystemExit: with status 75, after SIGTERM and a save; the same command goes on.
    """
    training = Training(job)
    with claim_for_all(job, training.run.mesh):
        training.resume()
        training.run_all()


class Training:
    """One run on one rank.

    Attributes: state: what changes with each step, and what a checkpoint holds of it.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        lines = list[str]()
        self._lines_before_log: list[str] | None = lines
        self.run = init_run(job, self._announce)
        # From here on, for a model may take minutes to build. The first step tells other ranks.
        self._sigterm_before = signal.signal(signal.SIGTERM, lambda *_: self.run.request_stop())
        check_shared(self.run.mesh, job.directory, "--out")
        built = build(job, self.run.device)
        self.weights_notes = built.notes
        self.task = built.task
        self.validation = built.validation_loader
        optimizer = optimizers.build(job.optimizer, built.model, job.train.batch_size)
        self.model, self.optimizer, self.loader = self.run.prepare(
            built.model, optimizer, built.train_loader
        )
        self.compute_loss = self.task.compute_loss(self.model)
        self.state = TrainingState(self.run, job.train.ema)
        self.directory = Path(job.directory)
        self._locks: list[IO[str]] = []
        settings = job.checkpoint
        # A thread that saves needs a group of its own: its messages must not mix with training.
        group = self.run.mesh.new_group() if settings.asynchronous else None
        self.checkpoints = Checkpoints(self.directory / "checkpoints", settings.keep, group)
        in_background = AsyncSaver(self.checkpoints) if settings.asynchronous else None
        self.saver = RunSaver(self, self.checkpoints, in_background, settings.last_save_wait_s)
        self.save_interval = SaveInterval(
            settings, self.run.mesh, self._announce, lambda: self.state.watch.seconds
        )
        self.record: Record | None = None
        self.epoch_steps = steps_of_epochs(job, self.loader)
        self.rates = optimizers.RateSchedule(job, self.epoch_steps)
        self.total_steps = self.rates.total_steps
        self.lines = [*lines, *describe(job, built, self.run.device, self.total_steps)]

    @property
    def step(self) -> int:
        """Optimizer steps since the beginning of the run, over all of its processes."""
        return self.state.step

    def _announce(self, line: str) -> None:
        """Keep a line for the header of the log; print it at once when the log is open."""
        if self._lines_before_log is not None:
            self._lines_before_log.append(line)
        elif line.startswith("note: "):
            self.log.note(line.removeprefix("note: "))
        else:  # of a strategy that waits for the first batch
            self.log.header([line])

    def resume(self) -> None:
        """Load the newest good checkpoint, if there is one; open log and display. Collective."""
        notes = list(self.weights_notes)
        self.fast_saver = open_fast_saver(self)
        if self.fast_saver is not None:
            every, place = self.job.checkpoint.fast_every_steps, self.fast_saver.checkpoints
            self.lines.append(f"saves every {every} steps in {place.directory}")
        if self.job.checkpoint.resume:
            layout = self.run.layout_of()
            saved, is_fast = load_newest(self.checkpoints, self.fast_saver, notes.append, layout)
            if saved is not None:
                notes += [*self._load(saved, is_fast), f"resumed from {saved.path}"]
                if self.step >= self.total_steps:
                    notes.append(
                        f"all {self.total_steps:,} steps were trained before, with the settings of "
                        "then: --out DIR begins a run of its own, more train.epochs goes on"
                    )
        if self.job.train.record:
            self.record = Record(self.job, self.run, self.step)
        is_first = self.run.rank == 0
        self.log = Log(
            self.directory,
            active=is_first,
            tensorboard=self.job.log.tensorboard,
            resume_step=self.step,
            loggers=self.job.log.loggers,
            settings=leaf_settings(self.job),
        )
        self.log.header(self.lines)
        self._lines_before_log = None
        if is_first and self.run.remote is not None:
            self.run.remote.publish_address(self.directory)
        for note in notes:
            self.log.note(note)
        self.progress = Progress(
            active=is_first,
            epochs=self.job.train.epochs,
            total_steps=self.total_steps,
            done_steps=self.step,
        )
        self.state.begin_interval()

    def _load(self, saved: Saved, is_fast: bool) -> list[str]:
        notes = self.state.load(saved, self.job.train.accept_data == "changed")
        self.save_interval.resume(saved.step, saved.info.get("save_interval"))
        try:
            self.saver.resume(None if is_fast else saved.step, saved.info["best"])
        except CleanupFailed as error:
            notes.append(f"{error}; training goes on")
        return notes

    def run_all(self) -> None:
        """Train all remaining epochs, and end the run. Collective."""
        try:
            while self.step < self.total_steps:
                self._epoch()
            if self.fast_saver is not None and self.run.rank == 0:
                shutil.rmtree(self.fast_saver.checkpoints.directory.parent, ignore_errors=True)
            self._finish()
        except KeyboardInterrupt:
            if self.run.rank == 0:
                leave_stop(self.directory, self.step)
            raise
        finally:
            self.loader.close()
            self.saver.close()
            self.progress.close()
            self.log.close()
            signal.signal(signal.SIGTERM, self._sigterm_before)

    def _epoch(self) -> None:
        epoch = self.loader.epoch
        steps = self.epoch_steps[epoch]
        first = self.step - sum(self.epoch_steps[:epoch])
        self.progress.epoch(epoch + 1, steps, first)
        stopping = False
        for index, batch in enumerate(self.loader, start=first):
            self._step(batch, epoch + index / steps)
            stopping = self._stop_requested()
            if self.step == self.total_steps or index + 1 == steps:
                break  # evaluation and save of the epoch come before a stop
            if stopping:
                self._stop()
            if self.save_interval.is_due(self.step):
                self._save()
            self._save_fast()
        ended = self.step == self.total_steps
        best = (ended or (epoch + 1) % self.job.evaluation.every == 0) and self._evaluate(epoch + 1)
        due = (epoch + 1) % self.job.checkpoint.every_epochs == 0
        # A stop saves here: the evaluation belongs to this step, and is not made again.
        if ended or stopping or best or due or self.save_interval.is_due(self.step):
            self._save(best, must_succeed=ended)
        self._save_fast()
        if stopping and not ended:
            self._stop()

    def _step(self, batch: Any, epochs: float) -> None:
        factor = self.rates.factor(epochs, self.step)
        rate = take_step(self.job, self.run, self.optimizer, self.compute_loss, batch, factor)
        self.state.count_step(self.loader.share.global_rows)
        self.progress.step()
        self.save_interval.after_step(self.step)
        if self.job.train.check_replicas and self.step % self.job.train.check_replicas == 0:
            self.run.check_replicas()
        if self.step % self.job.log.every == 0 or self.step == self.total_steps:
            self._log(rate)

    def _log(self, rate: float) -> None:
        """Log one record of the steps since the last one."""
        record = {
            "step": self.step,
            "epoch": self.loader.epoch + 1,
            "sample": self.loader.position,
            **self.state.end_interval(self.task),
            "lr": rate,
            "time_s": self.state.watch.seconds,
        }
        self.log.write("train", record)
        self.progress.show(record)

    def _evaluate(self, epoch: int) -> bool:
        """Evaluate the model, or its moving average. Return True if it is the best so far."""
        self.state.synchronize()
        average = self.state.ema
        with self.pause("evaluating"), nullcontext() if average is None else average.in_place():
            sums = self.run.evaluate(supervised(self.task.measures, self.model), self.validation)
        self.state.final = {"step": self.step, "epoch": epoch, **self.task.report(sums)}
        self.log.write("validation", {**self.state.final, "time_s": self.state.watch.seconds})
        self.progress.evaluation(self.state.final)
        # First the outcome of the save before: if it failed, its report is not the one to beat.
        self.saver.wait()
        return self._is_best()

    def _is_best(self) -> bool:
        """Return True, and remember it, if this very step has the best evaluation so far."""
        if self.state.final is None or self.state.final["step"] != self.step:
            return False
        if not math.isfinite(self.state.final["loss"]) and self.job.train.nonfinite != "ignore":
            return False
        best = self.saver.best
        is_better = best is None or self.task.score(self.state.final) > self.task.score(best)
        if is_better:
            self.saver.best = self.state.final
        return is_better

    def _save(self, best: bool = False, must_succeed: bool = False) -> None:
        """Save everything. Collective. A failure is noted, and raised only if `must_succeed`."""
        self.save_interval.begin_save(self.step)
        self.saver.wait()
        if self.run.rank == 0:
            lock = make_again(self.job, self.log)
            self._locks += [] if lock is None else [lock]
        state = self._collect(must_succeed)
        if state is None:
            self.saver.skip()
            return
        try:
            if self.record is not None:
                self.record.save(self.step)
        except RecordError as error:
            self.log.note(f"{error}; training goes on")
        self.saver.save(self.step, state, best, must_succeed)
        if not must_succeed and self.step in (self.saver.saved_step, self.saver.in_flight):
            self.save_interval.end_save()

    def _save_fast(self) -> None:
        """Save in the fast directory if it is due, and no checkpoint has this step. Collective."""
        saver = self.fast_saver
        if saver is None or self.step % self.job.checkpoint.fast_every_steps:
            return
        self.saver.wait_for_best()
        if self.saver.saved_step != self.step and (state := self._collect()) is not None:
            saver.save(self.step, state, is_best=False, must_succeed=False)

    def _collect(self, must_succeed: bool = False) -> State | None:
        """Return what a checkpoint holds; None, with a note, if that is not finite. Collective."""
        self.state.synchronize()
        if self.job.train.check_replicas:
            self.run.check_replicas()
        try:
            tensors, info, private = self.state.collect(self.saver.best)
            return tensors, {**info, **self.save_interval.info()}, private
        except TrainingDiverged as error:
            if must_succeed:
                raise
            self.log.note(f"{error} Nothing is saved at step {self.step}")
            return None

    def _stop_requested(self) -> bool:
        """Return True if a rank was asked to stop: the same answer on all ranks.

        The question waits for the device, so on a GPU it is asked only every `log.every` steps.
        """
        if self.run.device.type != "cpu" and self.step % self.job.log.every != 0:
            return False
        return self.run.stopping()

    def _stop(self) -> None:
        """Save if this step is not saved yet, and exit. Collective."""
        self.saver.wait()
        if self.saver.saved_step != self.step:
            # The save after the evaluation may have failed: then this is the second try.
            self._save(self._is_best(), must_succeed=True)
        self.run.end_trace()
        note = f"stopped at step {self.step}, and saved; the same command goes on from there"
        self.log.note(note)
        raise SystemExit(EXIT_RESTART)

    @contextmanager
    def pause(self, doing: str) -> Iterator[None]:
        """Exclude what is done in this context from speed, training time and the trace's steps."""
        with self.progress.paused(doing), self.state.watch.excluded(), self.run.outside_step(doing):
            yield

    def _finish(self) -> None:
        """Print the closing table and draw the curves, on rank 0. Collective."""
        self.run.end_trace()
        curves = self.directory / "curves.png"
        if self.run.rank == 0:
            for line in self.run.report():
                self.log.note(line)
            with self.pause("drawing"):
                plot_or_note(self.directory, curves, self.log.note)
        self.progress.close()
        self.log.close(
            {
                "final": self.state.final,
                "best": self.saver.best,
                "epochs": self.job.train.epochs,
                "steps": self.step,
                "time_s": self.state.watch.seconds,
                "checkpoint": newest(self.checkpoints.directory) if self.run.rank == 0 else None,
                "curves": curves if curves.is_file() else None,
            }
        )
        # A SIGTERM that comes meanwhile, as before a time limit of Slurm, ends no rank.
        self.run.mesh.barrier()
