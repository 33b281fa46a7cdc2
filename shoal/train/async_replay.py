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

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint import Checkpoints
from shoal.comm.mesh import Mesh
from shoal.comm.tensor_digest import as_bytes
from shoal.config.job import Job
from shoal.data.seeds import load_random_state, preserve_rng_state, random_state, seed_all
from shoal.launch.environment import read as read_place
from shoal.parameter_server.node.partition_state import PartitionState
from shoal.parameter_server.optimizer_spec import OptimizerSpec
from shoal.parameter_server.recorded_order import RecordedOrder, ReplayClient, ReplayStep
from shoal.run import Run
from shoal.run.preparation import RunSettings
from shoal.run.prepared import Prepared
from shoal.strategies import build_strategies, parse_line
from shoal.strategies.base import LocalModel, Strategy, no_op
from shoal.strategies.server.strategy import Server
from shoal.strategies.server.worker_engine import WorkerEngine
from shoal.strategies.transforms.accumulate import Accumulate
from shoal.strategies.transforms.compile import Compile
from shoal.strategies.transforms.precision import Precision
from shoal.train import optimizer as optimizers
from shoal.train.build import build, steps_of_epochs, take_step
from shoal.train.record import RunRecord


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


def replay(directory: Path, step: int | None = None) -> Replay:
    """Run the newest record of a run again, up to a checkpoint, and compare. For one process.

    Args:
        step: stop at the checkpoint of this step; None for the newest.

    Raises:
        RecordError: there is no record, or it has a gap, or no such checkpoint.
        CheckpointError: the checkpoint at the start or at the end cannot be read.
    """
    start_s = time.monotonic()
    record = RunRecord.newest(directory)
    target = record.newest_saved(Checkpoints(directory / "checkpoints"), step)
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    with preserve_rng_state():
        # As many threads and the same kernels as the recorded ranks.
        torch.set_num_threads(int(record.info["threads"]))
        torch.use_deterministic_algorithms(record.job.train.deterministic)
        try:
            tensors = _replayed(record, target.step)
        finally:
            torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(deterministic)
    workers = len(record.private)
    return Replay(
        first=record.step,
        last=target.step,
        workers=workers,
        pushes=workers * (target.step - record.step),
        seconds=time.monotonic() - start_s,
        checkpoint=target.path,
        differing=_differing(tensors, target.tensors),
        differing_circumstances=record.differing_circumstances,
    )


def _replayed(record: RunRecord, last: int) -> dict[str, Tensor]:
    """Take all steps of a recorded run up to `last`. Return what rank 0 would save in the end."""
    partitions: list[PartitionState] = []  # of all servers; the first worker fills it
    workers = [Worker(record, rank, partitions) for rank in range(len(record.private))]
    events, steps = record.events_until(last), last - record.step
    order = RecordedOrder(events, len(partitions), len(workers), steps)
    buffers: dict[int, list[Tensor]] = {}  # rank 0's, where the run has synchronized its workers

    def step(worker: int, number: int) -> ReplayStep:
        if worker and number in buffers:
            own = workers[worker].model.buffers()
            for buffer, other in zip(own, buffers[number], strict=True):
                buffer.copy_(other)
        pushed = workers[worker].step()
        if worker == 0 and number + 1 in order.agreed:
            buffers[number + 1] = [each.clone() for each in workers[0].model.buffers()]
        return pushed

    order.replay(partitions, lambda rank, *values: workers[rank].client.take(*values), step)
    load_random_state(workers[0].random, workers[0].run.device)
    return workers[0].run.state()[0]


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
        # As bytes, so that NaN equals NaN, and 0.0 differs from -0.0.
        elif not torch.equal(as_bytes(a), as_bytes(b)):
            differing.append((name, float((a.double() - b.double()).abs().max())))
    # Weights before the optimizer's state, which follows from them.
    return sorted(differing, key=lambda item: (not item[0].startswith("model."), -item[1]))


class Worker:
    """Rank `rank` of a recorded run, in its state before the first step.

    Args:
        partitions: the partitions of all servers, shared by all workers. Make the worker of rank 0
            first: it fills this list.
    """

    def __init__(self, record: RunRecord, rank: int, partitions: list[PartitionState]) -> None:
        # Samples are the same with any number of data-loader workers.
        job = self.job = replace(record.job, data=replace(record.job.data, workers=0))
        ranks = len(record.private)
        local_world = int(record.info.get("local_world", ranks))
        mesh = _SingleRankAxis(
            rank=rank,
            size=ranks,
            device=torch.device(record.info["device"]),
            place=replace(read_place(os.environ), world=ranks, local_world=local_world),
        )
        seed_all(job.seed)
        built = build(job, mesh.device)
        strategies = _strategies(job, partitions)
        settings = RunSettings(job.seed, job.train.accumulate)
        self.run = Run(Prepared(mesh, strategies, settings, announce=no_op))
        optimizer = optimizers.build(job.optimizer, built.model, job.train.batch_size)
        self.model, self.optimizer, self.loader = self.run.prepare(
            built.model, optimizer, built.train_loader
        )
        # The bits are compared at the end; other data is one way to come to others.
        self.run.load_state(record.tensors, record.info, record.private[rank], accept_data=True)
        self.compute_loss = built.task.compute_loss(self.model)
        self.client = next(s for s in strategies if isinstance(s, _ReplayStrategy)).client
        # All workers share this process, so each brings its random state with each step.
        self.random = random_state(mesh.device)
        self._first_step = record.step
        self._steps = self._all_steps()

    def step(self) -> ReplayStep:
        """Take the next step of this worker. Return what it pushed."""
        load_random_state(self.random, self.run.device)
        next(self._steps)
        self.random = random_state(self.run.device)
        return self.client.stepped()

    def _all_steps(self) -> Iterator[None]:
        epoch_steps = steps_of_epochs(self.job, self.loader)
        rates = optimizers.RateSchedule(self.job, epoch_steps)
        step = self._first_step
        while step < rates.total_steps:
            epoch = self.loader.epoch
            first = step - sum(epoch_steps[:epoch])
            for index, batch in enumerate(self.loader, start=first):
                factor = rates.factor(epoch + index / epoch_steps[epoch], step)
                of_run = self.job, self.run, self.optimizer, self.compute_loss
                take_step(*of_run, batch, factor)
                step += 1
                yield


def _strategies(job: Job, partitions: list[PartitionState]) -> list[Strategy]:
    """Return the strategies in the order of `shoal.init`, with a replay in place of servers."""
    chosen = [
        _ReplayStrategy(strategy, partitions) if isinstance(strategy, Server) else strategy
        for strategy in build_strategies(parse_line(job.strategy))
    ]
    compiled: list[Strategy] = [Compile()] if job.model.compile else []
    last = Accumulate(job.train.accumulate)
    return [Precision(job.train.precision, None), *compiled, *chosen, last]


class _ReplayStrategy(Strategy):
    """Stands in for the strategy `Server`: the same worker, without servers.

    Attributes:
        client: is there once the optimizer is attached.
    """

    client: ReplayClient

    def __init__(self, options: Server, partitions: list[PartitionState]) -> None:
        self.options = options
        self.partitions = partitions

    def apply(self, model: LocalModel, mesh: Mesh) -> LocalModel:
        engine = WorkerEngine(self.options, model, mesh, self._connect)
        return replace(
            model,
            forward=engine.forward,
            run=engine.run,
            gather_params=engine.gather,
            strategy_state=engine,
        )

    def _connect(self, engine: WorkerEngine, spec: OptimizerSpec) -> Any:
        self.client = ReplayClient(engine.flat, spec, self.partitions, engine.compression)
        return self.client


@dataclass(frozen=True)
class _SingleRankAxis(Mesh):
    """A mesh of several ranks in which this one is alone: its collectives send nothing.

    The other ranks are workers in the same process. All that collectives would exchange is in the
    record, or equal on all ranks.
    """

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        return tensor

    def broadcast_tensor(self, tensor: Tensor) -> None:
        pass

    def broadcast_str(self, text: str) -> str:
        return text

    def all_gather_str(self, text: str, asked_by: str = "") -> list[str]:
        return [text] * self.size

    def barrier(self) -> None:
        pass
