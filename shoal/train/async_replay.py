"""`shoal replay`: a recorded run of parameter servers once more, in one process, to the same bits.

      record   ── which values every step began with, which push came when
                        │
      worker 0  model, data, random numbers ─┐
      worker 1  model, data, random numbers ─┼─ one after the other ── parts, stepped as the servers did
      worker 2  model, data, random numbers ─┘            │
                                                 compared with the checkpoint that the run has saved

Workers do here what they did there, through the same `Run` and the same strategies; only the
servers, and the other ranks, are stand-ins."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from shoal.data.seeds import load_random_state, preserve_rng_state
from shoal.errors import CheckpointError, RecordError, UsageError
from shoal.parameter_server.node.partition_state import PartitionState
from shoal.parameter_server.replay.recorded_order import RecordedOrder, ReplayStep, replay_events
from shoal.train.checkpoint import Checkpoints, Saved
from shoal.train.record import ReplayStart, events_until, newest_start, saved_steps
from shoal.train.replay_worker import Worker


@dataclass(frozen=True)
class Replay:
    """What came of it.

    Attributes: first, last: the steps of the run between which everything was done again. pushes:
        gradients of whole models that were applied, over all workers. differing: of each tensor
        that is not the checkpoint's bit for bit, its name and its largest difference; the
            worst first. Empty for a faithful replay.
        otherwise: what is not here as it was there, and may change the last bits.
    """

    first: int
    last: int
    workers: int
    pushes: int
    seconds: float
    checkpoint: Path
    differing: list[tuple[str, float]]
    differing_circumstances: list[str]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "checkpoint": str(self.checkpoint), "same": not self.differing}

    def __str__(self) -> str:
        done = (
            f"{self.pushes:,} pushes of {self.workers} workers, steps {self.first} to {self.last}, "
            f"done again in {self.seconds:.1f} s"
        )
        if not self.differing:
            return f"{done}: bit for bit {self.checkpoint}"
        name, difference = self.differing[0]
        told = (
            f"; {'; '.join(self.differing_circumstances)}" if self.differing_circumstances else ""
        )
        others = f" and {len(self.differing) - 1} other tensors" if len(self.differing) > 1 else ""
        return f"{done}: not {self.checkpoint}: {name} differs by up to {difference:.3g},{others}{told}"


def replay(directory: Path, output: Path | None = None, step: int | None = None) -> Replay:
    """Do again what the newest record of a run tells of, as far as there is a checkpoint, and
    compare. One process.

    Args:
        output: a .safetensors file for the model as it is in the end.
        step: go as far as the checkpoint of this step; None for the newest.

    Raises:
        RecordError: there is no record, or it has a gap, or no such checkpoint.
        CheckpointError: what the record begins or ends with cannot be read.
        UsageError: `output` is not a .safetensors file.
    """
    if output is not None and output.suffix != ".safetensors":
        raise UsageError(
            f"-o {output}: the file is in the safetensors format; name it "
            f"{output.stem}.safetensors."
        )
    begun_s = time.monotonic()
    start = newest_start(directory)
    target = _newest_saved(start, Checkpoints(directory / "checkpoints"), step)
    with _recorded_environment(start):
        crew = _ReplayWorkers(start, target.step)
        tensors = crew.follow()
    if output is not None:
        model = {
            name.removeprefix("model."): value
            for name, value in tensors.items()
            if name.startswith("model.")
        }
        safetensors.torch.save_file(
            {name: value.cpu().contiguous().clone() for name, value in model.items()}, output
        )
    pushes, seconds = len(crew.workers) * crew.course.steps, time.monotonic() - begun_s
    differing = _differing(tensors, target.tensors)
    return Replay(
        start.step,
        target.step,
        len(crew.workers),
        pushes,
        seconds,
        target.path,
        differing,
        start.differing_circumstances,
    )


class _ReplayWorkers:
    """All workers of a run, and its servers' parts."""

    def __init__(self, start: ReplayStart, last: int) -> None:
        self.held: list[PartitionState] = []
        self.workers = [Worker(start, rank, self.held) for rank in range(len(start.private))]
        self.course = RecordedOrder(
            events_until(start, last), len(self.held), len(self.workers), last - start.step
        )
        self.buffers: dict[int, list[Tensor]] = {}

    def follow(self) -> dict[str, Tensor]:
        """All steps; what rank 0 would save in the end."""
        replay_events(
            self.course,
            self.held,
            lambda worker, part, values: self.workers[worker].take(part, values),
            self._step,
        )
        load_random_state(self.workers[0].random)
        tensors, _, _ = self.workers[0].run.state()
        return tensors

    def _step(self, worker: int, step: int) -> ReplayStep:
        """Where workers have agreed on values, they have taken rank 0's buffers as well."""
        if worker and step in self.buffers:
            self.workers[worker].load_buffers(self.buffers[step])
        stepped = self.workers[worker].step()
        if worker == 0 and step + 1 in self.course.agreed:
            self.buffers[step + 1] = self.workers[0].buffers()
        return stepped


def _newest_saved(start: ReplayStart, checkpoints: Checkpoints, wanted: int | None) -> Saved:
    """The newest checkpoint up to which the record goes, or the one of step `wanted`."""
    steps = saved_steps(start)
    for step in reversed(steps):
        if wanted not in (None, step):
            continue
        try:
            saved = checkpoints.load(_silent, step=step)
        except CheckpointError:  # pruned, or its save failed and training went on
            continue
        if saved is not None:
            return saved
    recorded = (
        f"it was saved at steps {', '.join(map(str, steps[-3:]))}"
        if steps
        else "nothing was saved since"
    )
    of_step = "" if wanted is None else f" of step {wanted}"
    raise RecordError(
        f"{start.path} leads to no checkpoint{of_step} that is still in {checkpoints.directory}: "
        f"{recorded}. A record is as good as its last save; see checkpoint.every_steps and "
        "checkpoint.keep."
    )


def _differing(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> list[tuple[str, float]]:
    """Of weights and optimizer state, the worst first."""
    names = [name for name in expected if name.startswith(("model.", "optimizer."))]
    worst = []
    for name in names:
        there, here = expected[name].cpu(), found[name].cpu() if name in found else torch.tensor(())
        if here.shape != there.shape:
            worst.append((name, float("inf")))
        elif not torch.equal(_bits(here), _bits(there)):
            worst.append((name, float((here.double() - there.double()).abs().max())))
    return sorted(worst, key=lambda item: (not item[0].startswith("model."), -item[1]))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@contextmanager
def _recorded_environment(start: ReplayStart) -> Iterator[None]:
    """Threads and kernels of the recorded ranks; afterwards those of before, and the random
    numbers too.
    """
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    with preserve_rng_state():
        torch.set_num_threads(int(start.info["threads"]))
        torch.use_deterministic_algorithms(start.job.train.deterministic)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(deterministic)


def _silent(_: str) -> None:
    """What is skipped is not what was asked for."""
