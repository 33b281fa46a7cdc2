"""`shoal replay`: run a recorded run of parameter servers again, in one process, to the same bits.

      record    the values with which every step began, and the order of pushes
                        │
      worker 0  model, data, random numbers ─┐
      worker 1  model, data, random numbers ─┼─ one at a time ── partitions, stepped in the order
      worker 2  model, data, random numbers ─┘        │          of the record
                                                      │
                                            compared with a checkpoint of the run

Workers go through the same `Run` and the same strategies as in the run. Only the servers and the
connections to other ranks are replaced.
"""

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
    """The result of a replay.

    Attributes:
        first, last: the steps of the run between which everything was done again.
        pushes: gradients of full models that were applied, over all workers.
        differing: name and largest difference of each tensor that is not bit for bit that of the
            checkpoint, the largest first. Empty for a faithful replay.
        differing_circumstances: properties of this machine that may change the last bits.
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
        reasons = "".join(f"; {reason}" for reason in self.differing_circumstances)
        others = f" and {len(self.differing) - 1} other tensors" if len(self.differing) > 1 else ""
        return (
            f"{done}: not {self.checkpoint}: {name} differs by up to {difference:.3g},"
            f"{others}{reasons}"
        )


def replay(directory: Path, output: Path | None = None, step: int | None = None) -> Replay:
    """Run the newest record of a run again, up to a checkpoint, and compare. For one process.

    Args:
        output: a .safetensors file to which the model is written in the end.
        step: stop at the checkpoint of this step; None for the newest.

    Raises:
        RecordError: there is no record, or it has a gap, or no such checkpoint.
        CheckpointError: the checkpoint at the start or at the end cannot be read.
        UsageError: `output` is not a .safetensors file.
    """
    if output is not None and output.suffix != ".safetensors":
        raise UsageError(
            f"-o {output}: the file is in the safetensors format; name it "
            f"{output.stem}.safetensors."
        )
    if output is not None and not output.parent.is_dir():
        raise UsageError(f"-o {output}: there is no directory {output.parent}.")
    start_s = time.monotonic()
    start = newest_start(directory)
    target = _newest_saved(start, Checkpoints(directory / "checkpoints"), step)
    with _recorded_environment(start):
        replayed = _ReplayedRun(start, target.step)
        tensors = replayed.run()
    if output is not None:
        # Clones, because safetensors refuses tensors that share memory.
        model = {
            name.removeprefix("model."): value.cpu().contiguous().clone()
            for name, value in tensors.items()
            if name.startswith("model.")
        }
        safetensors.torch.save_file(model, output)
    return Replay(
        first=start.step,
        last=target.step,
        workers=len(replayed.workers),
        pushes=len(replayed.workers) * replayed.order.steps,
        seconds=time.monotonic() - start_s,
        checkpoint=target.path,
        differing=_differing(tensors, target.tensors),
        differing_circumstances=start.differing_circumstances,
    )


class _ReplayedRun:
    """All workers of a run, and the partitions of its servers, which they share."""

    def __init__(self, start: ReplayStart, last: int) -> None:
        self.partitions: list[PartitionState] = []
        self.workers = [Worker(start, rank, self.partitions) for rank in range(len(start.private))]
        self.order = RecordedOrder(
            events_until(start, last), len(self.partitions), len(self.workers), last - start.step
        )
        self.buffers: dict[int, list[Tensor]] = {}

    def run(self) -> dict[str, Tensor]:
        """Take all steps. Return the tensors that rank 0 would save in the end."""
        replay_events(
            self.order,
            self.partitions,
            lambda worker, partition, values: self.workers[worker].take(partition, values),
            self._step,
        )
        load_random_state(self.workers[0].random, self.workers[0].run.device)
        tensors, _, _ = self.workers[0].run.state()
        return tensors

    def _step(self, worker: int, step: int) -> ReplayStep:
        """Take step `step` of a worker. Return what it pushed.

        Where the run has synchronized its workers, all have taken rank 0's buffers too.
        """
        if worker and step in self.buffers:
            self.workers[worker].load_buffers(self.buffers[step])
        pushed = self.workers[worker].step()
        if worker == 0 and step + 1 in self.order.agreed:
            self.buffers[step + 1] = self.workers[0].buffers()
        return pushed


def _newest_saved(start: ReplayStart, checkpoints: Checkpoints, at_step: int | None) -> Saved:
    """Return the newest checkpoint that the record covers, or the one of step `at_step`."""
    steps = saved_steps(start)
    for step in reversed(steps):
        if at_step not in (None, step):
            continue
        try:
            saved = checkpoints.load(_ignore, step=step)
        except CheckpointError:  # it was pruned, or its save failed
            continue
        if saved is not None:
            return saved
    recorded = "nothing was saved since"
    if steps:
        recorded = f"it was saved at steps {', '.join(map(str, steps[-3:]))}"
    of_step = "" if at_step is None else f" of step {at_step}"
    raise RecordError(
        f"{start.path} leads to no checkpoint{of_step} that is still in {checkpoints.directory}: "
        f"{recorded}. A record is as good as its last save; see checkpoint.every_steps and "
        "checkpoint.keep."
    )


def _differing(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> list[tuple[str, float]]:
    """Return names and differences of unequal weights and optimizer state, the largest first."""
    names = [name for name in expected if name.startswith(("model.", "optimizer."))]
    differing = []
    for name in names:
        a = actual[name].cpu() if name in actual else torch.tensor(())
        b = expected[name].cpu()
        if a.shape != b.shape:
            differing.append((name, float("inf")))
        elif not torch.equal(_bits(a), _bits(b)):
            differing.append((name, float((a.double() - b.double()).abs().max())))
    # Weights before the optimizer's state, which follows from them.
    return sorted(differing, key=lambda item: (not item[0].startswith("model."), -item[1]))


def _bits(tensor: Tensor) -> Tensor:
    # As bytes, so that NaN equals NaN, and 0.0 differs from -0.0.
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@contextmanager
def _recorded_environment(start: ReplayStart) -> Iterator[None]:
    """Use as many threads and the same kernels as the recorded ranks in this context.

    Afterwards they are as before, and the random state too.
    """
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    with preserve_rng_state():
        torch.set_num_threads(int(start.info["threads"]))
        torch.use_deterministic_algorithms(start.job.train.deterministic)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(deterministic)


def _ignore(_: str) -> None:
    """Print nothing about checkpoints that were skipped: a later one was requested or tried."""
