"""A training run on one rank: build, resume, train, evaluate, save. It knows no strategy.

for each epoch
    for each global batch        this rank's share of it
        learning rate            a function of the step
        run, reduce              run.forward_backward
        clip
        step, gather             optimizer.step
    evaluate                     every sample once
    save                         after what it measured is known
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.config.job import Job
from shoal.errors import CheckpointError, CleanupFailed, ConfigError, RecordError, ShoalError
from shoal.launch.rank import EXIT_RESTART
from shoal.plotting.curves import plot
from shoal.run import init_with_place
from shoal.strategies.base import TOTALS_LENGTH
from shoal.train import optimizer as optimizers
from shoal.train.build import Components, build
from shoal.train.checkpoint import AsyncSaver, Checkpoints, Saved, newest
from shoal.train.ema import Ema
from shoal.train.log import Log
from shoal.train.lr_schedule import factor, set_learning_rate
from shoal.train.progress import Progress
from shoal.train.record import Record
from shoal.train.run_directory import claim_for_all
from shoal.train.stopwatch import Stopwatch


def train(job: Job) -> None:
    """Train `job` on this rank, from its newest checkpoint on if there is one. Collective.

    Raises: SystemExit(75): SIGTERM was received and everything is saved; the same command goes on
    from there."""
    training = Training(job)
    with claim_for_all(job, training.run.mesh):
        training.resume()
        training.run_all()


class Training:
    """One run on one rank. `step` counts optimizer steps since the very beginning."""

    def __init__(self, job: Job) -> None:
        self.job = job
        lines: list[str] = []
        self.run = init_with_place(
            job.strategy,
            seed=job.seed,
            accumulate=job.train.accumulate,
            precision=job.train.precision,
            compile=job.model.compile,
            step_in_backward=job.optimizer.in_backward,
            trace=job.log.trace,
            trace_to=job.directory,
            announce=lines.append,
        )
        # From now on: building a model can take minutes, and the first step tells the other ranks.
        self._sigterm_before = signal.signal(signal.SIGTERM, lambda *_: self.run.request_stop())
        built = build(job, self.run.device)
        if job.train.deterministic:
            os.environ.setdefault(
                "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
            )  # without it cuBLAS refuses to be deterministic
        torch.use_deterministic_algorithms(job.train.deterministic)
        torch.backends.cudnn.benchmark = job.train.cudnn_benchmark
        self.weights_notes = built.notes
        self.task, self.validation = built.task, built.validation_loader
        optimizer = optimizers.build(job.optimizer, built.model, job.train.batch_size)
        self.model, self.optimizer, self.loader = self.run.prepare(
            built.model, optimizer, built.train_loader
        )
        self.ema = Ema(self.run.parameters(), job.train.ema) if job.train.ema else None
        self.directory = Path(job.directory)
        beside = job.checkpoint.asynchronous
        group = self.run.mesh.new_group() if beside else None
        self.checkpoints = Checkpoints(self.directory / "checkpoints", job.checkpoint.keep, group)
        mesh = self.run.mesh
        self.background = (
            AsyncSaver(self.checkpoints, mesh.size // mesh.pipeline.size) if beside else None
        )
        self.in_flight = -1
        self.step, self.saved_step, self.watch = 0, -1, Stopwatch()
        self.record: Record | None = None
        self.final: dict[str, Any] | None = None
        self.best: dict[str, Any] | None = None
        self.best_saved: dict[str, Any] | None = None
        self.sums = torch.zeros(TOTALS_LENGTH, dtype=torch.float64, device=self.run.device)
        self.epoch_steps = self._steps_of_epochs()
        self.total_steps = min(sum(self.epoch_steps), job.train.max_steps or sum(self.epoch_steps))
        self.lines = [*lines, *self._description(built)]

    def resume(self) -> None:
        """Go on from the newest good checkpoint, if there is one; open what is written and
        shown. Collective.
        """
        notes = list(self.weights_notes)
        saved = (
            self.checkpoints.load(notes.append, like=self._state_layout())
            if self.job.checkpoint.resume
            else None
        )
        if saved is not None:
            self._load(saved, notes)
            notes.append(f"resumed from {saved.path}")
        if self.job.train.record:
            self.record = Record(self.job, self.run, self.step)
        self._open(notes)
        self.unlogged_samples, self.logged_s = 0, self.watch.seconds

    def _state_layout(self) -> Callable[[str], Tensor | None]:
        """Tells how this rank holds what a checkpoint holds."""
        like = self.run.layout_of()
        return lambda name: like(
            "model." + name.removeprefix("ema.") if name.startswith("ema.") else name
        )

    def run_all(self) -> None:
        """All epochs that are left, and the end."""
        try:
            while self.step < self.total_steps:
                self._epoch()
            self._finish()
        finally:
            self._end_saving()
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
                break  # what is due at the end of an epoch comes before a stop
            if stopping:
                self._stop()
            if self._is_save_due():
                self._save()
        ended = self.step == self.total_steps
        best = (ended or (epoch + 1) % self.job.evaluation.every == 0) and self._evaluate(epoch + 1)
        due = (epoch + 1) % self.job.checkpoint.every_epochs == 0 or self._is_save_due()
        if ended or stopping or best or due:
            self._save(best, must=ended)
        if stopping and not ended:
            self._stop()

    def _step(self, batch: Any, epochs: float) -> None:
        inputs, target = self.run.to_device(batch)
        rate = set_learning_rate(
            self.optimizer, factor(self.job.schedule, epochs, self.step / self.total_steps)
        )
        self.optimizer.zero_grad()
        self.run.forward_backward(
            self.task.loss, self.model, inputs, target, measure=self.task.num_correct
        )
        if self.job.train.clip_norm is not None:
            self.run.clip_gradients(self.job.train.clip_norm)
        self.optimizer.step()
        if self.ema is not None:
            self.run.wait()
            self.ema.update()
        self.step += 1
        assert self.run.totals is not None
        self.sums += self.run.totals
        self.unlogged_samples += self.loader.share.global_rows
        self.progress.step(self.loader.share.global_rows)
        if self.step % self.job.log.every == 0 or self.step == self.total_steps:
            self._log(rate)

    def _log(self, rate: float) -> None:
        """One record of the steps since the last one: the only place where a step waits for the
        device.
        """
        loss, count, _, hits, predictions, *_ = self.sums.tolist()
        self.sums.zero_()
        seconds = self.watch.seconds
        record = {
            "step": self.step,
            "epoch": self.loader.epoch + 1,
            "sample": self.loader.position,
            **self.task.training_report(loss / max(count, 1.0), hits, predictions),
            "lr": rate,
            "samples_per_s": self.unlogged_samples / max(seconds - self.logged_s, 1e-9),
            "time_s": seconds,
        }
        self.log.step(record)
        self.progress.show(record)
        self.unlogged_samples, self.logged_s = 0, seconds

    def _evaluate(self, epoch: int) -> bool:
        """Measure the model, or its moving average, on every validation sample; whether it is
        the best so far.
        """
        self._synchronize()
        with self._pause("evaluating"), self.ema.in_place() if self.ema else nullcontext():
            sums = self.run.evaluate(self.task.measures, self.model, self.validation)
        self.final = {"step": self.step, "epoch": epoch, **self.task.report(sums)}
        self.log.evaluation({**self.final, "time_s": self.watch.seconds})
        self.progress.evaluation(self.final)
        self._finish_save()  # if it failed, what it was to save is not what there is to beat
        return self._is_best()

    def _is_best(self) -> bool:
        """Whether what this very step was found to be worth is more than ever before; it is the
        best from now on.
        """
        if self.final is None or self.final["step"] != self.step:
            return False
        better = self.best is None or self.task.score(self.final) > self.task.score(self.best)
        if better:
            self.best = self.final
        return better

    def _save(self, best: bool = False, must: bool = False) -> None:
        """Save everything. A save that fails is said, and training goes on; the last one must
        not fail.
        """
        self._finish_save()
        self._synchronize()
        tensors, info, private = self.run.state()
        self._save_record()
        tensors |= {"sums": self.sums} | (self.ema.state() if self.ema else {})
        info |= {
            "step": self.step,
            "time_s": self.watch.seconds,
            "final": self.final,
            "best": self.best,
        }
        if self.background is not None and not must:
            with self._pause("saving"):
                self.background.start(self.step, tensors, info, private, best)
            self.in_flight = self.step
            return
        self._collect_save(
            self.step, lambda: self.checkpoints.save(self.step, tensors, info, private, best), must
        )

    def _save_record(self) -> None:
        try:
            if self.record is not None:
                self.record.save(self.step)
        except RecordError as error:
            self.log.note(f"{error}; training goes on")

    def _synchronize(self) -> None:
        """Where ranks have been at different weights, all go on from the same, and from rank 0's
        average of them and its sums, which are those that are logged."""
        if not self.run.synchronize():
            return
        self.run.mesh.broadcast_tensor(self.sums)
        if self.ema is not None:
            self.ema.broadcast(self.run.mesh)

    def _finish_save(self) -> None:
        """Wait for the save that goes on beside training, and learn how it ended. Collective."""
        if self.background is None or self.in_flight < 0:
            return
        step, self.in_flight = self.in_flight, -1
        self._collect_save(step, self.background.wait)

    def _collect_save(self, step: int, ending: Callable[[], object], must: bool = False) -> None:
        """See a save to its end. `best` is still the one of when it began: it changes where no
        save is under way.
        """
        try:
            with self._pause("saving"):
                ending()
        except CleanupFailed as error:
            self.log.note(f"{error}; the next save, or the same command again, makes up for it")
        except CheckpointError as error:
            if must:
                raise
            self.log.note(f"{error}; training goes on")
            self.best = self.best_saved  # the best is one that can be loaded
            return
        self.saved_step, self.best_saved = step, self.best

    def _end_saving(self) -> None:
        """Where training ends by an error, nobody has learned yet how the save beside it ended."""
        lost = None if self.background is None else self.background.close()
        if isinstance(lost, CheckpointError):
            self.log.note(str(lost))
        elif lost is not None:  # another rank is gone, say
            self.log.note(
                f"the save of step {self.in_flight} did not end: {type(lost).__name__}: {lost}"
            )

    def _is_save_due(self) -> bool:
        """Whether checkpoint.every_steps asks for one now."""
        every = self.job.checkpoint.every_steps
        return every is not None and self.step % every == 0

    def _load(self, saved: Saved, notes: list[str]) -> None:
        notes += self.run.load_state(saved.tensors, saved.info, saved.private)
        if self.ema is not None:
            self.ema.load(saved.tensors)
        self.sums.copy_(saved.tensors["sums"])
        self.step, self.watch = saved.step, Stopwatch(saved.info["time_s"])
        self.final, self.best = saved.info["final"], saved.info["best"]
        self.best_saved = self.best
        try:
            self.checkpoints.complete(saved.step, None if self.best is None else self.best["step"])
        except CleanupFailed as error:
            notes.append(f"{error}; training goes on")

    def _open(self, notes: list[str]) -> None:
        """Say what kind of run this is."""
        first = self.run.rank == 0
        self.log = Log(
            self.directory,
            active=first,
            tensorboard=self.job.log.tensorboard,
            resume_step=self.step,
        )
        self.log.header(self.lines)
        if first and self.run.remote is not None:
            self.run.remote.publish_address(self.directory)
        for note in notes:
            self.log.note(note)
        self.progress = Progress(
            active=first,
            epochs=self.job.train.epochs,
            total_steps=self.total_steps,
            done_steps=self.step,
        )

    def _description(self, built: Components) -> list[str]:
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        rate = optimizers.scaled_rate(self.job.optimizer, self.job.train.batch_size)
        samples = (
            f"{len(built.source.train):,} samples, {len(built.source.validation):,} to validate"  # type: ignore[arg-type]
        )
        soft_targets = self.job.train.soft_targets
        return [
            f"{self.job.model.name}, {parameters:,} parameters, on {self.job.data.name}: {samples}",
            f"{self.job.strategy}, {self.run.device.type}, {self.job.train.precision}; "
            f"{self.job.optimizer.name}, learning rate {rate:g}; {self.total_steps:,} steps in "
            f"{self.directory}",
            *(
                [f"training loss with {soft_targets}, validation loss without"]
                if soft_targets
                else []
            ),
        ]

    def _steps_of_epochs(self) -> list[int]:
        steps = [self.loader.batches_in(epoch) for epoch in range(self.job.train.epochs)]
        if 0 in steps:
            raise ConfigError(
                [
                    f"train.batch_size: {self.job.train.batch_size} is more than the data set "
                    "holds, and train.drop_last leaves the rest out. Use a smaller batch, or "
                    "train.drop_last=false."
                ]
            )
        return steps

    def _stop_requested(self) -> bool:
        """The same answer on all ranks. Asking waits for the device, so a GPU is asked now and
        then only.
        """
        return (
            self.run.device.type == "cpu" or self.step % self.job.log.every == 0
        ) and self.run.stopping()

    def _stop(self) -> None:
        self._finish_save()
        if self.saved_step != self.step:
            self._save(
                self._is_best(), must=True
            )  # again, where the save after the evaluation has failed
        self.run.end_trace()
        self.log.note(
            f"stopped at step {self.step}, and saved; the same command goes on from there"
        )
        raise SystemExit(EXIT_RESTART)

    @contextmanager
    def _pause(self, doing: str) -> Iterator[None]:
        """What is not training counts neither as slow training nor as its time."""
        with self.progress.paused(doing), self.watch.excluded(), self.run.outside_step(doing):
            yield

    def _finish(self) -> None:
        self.run.end_trace()
        curves = self.directory / "curves.png"
        if self.run.rank == 0:
            for line in self.run.report():
                self.log.note(line)
            try:
                with self._pause("drawing"):
                    plot([self.directory], curves)
            except (ShoalError, OSError) as error:
                self.log.note(f"no curves were drawn: {error}")
        self.progress.close()
        self.log.close(
            {
                "final": self.final,
                "best": self.best,
                "epochs": self.job.train.epochs,
                "steps": self.step,
                "time_s": self.watch.seconds,
                "checkpoint": newest(self.checkpoints.directory) if self.run.rank == 0 else None,
                "curves": curves,
            }
        )
