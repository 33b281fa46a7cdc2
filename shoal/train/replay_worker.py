"""One worker of a recorded run: its model, data and random numbers, one step at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.mesh import Mesh
from shoal.config.job import Job
from shoal.data.seeds import load_random_state, random_state, seed_all
from shoal.launch.environment import read as read_place
from shoal.parameter_server.node.partition_state import PartitionState
from shoal.parameter_server.optimizer_spec import OptimizerSpec
from shoal.parameter_server.replay.recorded_order import ReplayStep
from shoal.parameter_server.replay.replay_client import ReplayedServers
from shoal.parameter_server.worker.client import WorkerClient
from shoal.run import Run
from shoal.run.preparation import RunSettings
from shoal.strategies import build_strategies, parse_line
from shoal.strategies.base import LocalModel, Strategy
from shoal.strategies.server.strategy import Server
from shoal.strategies.server.worker_engine import WorkerEngine
from shoal.strategies.transforms.accumulate import Accumulate
from shoal.strategies.transforms.compile import Compile
from shoal.strategies.transforms.precision import Precision
from shoal.train import optimizer as optimizers
from shoal.train.build import build
from shoal.train.lr_schedule import factor, set_learning_rate
from shoal.train.record import ReplayStart


class Worker:
    """Rank `rank` of a recorded run, in its state before the first step.

    Args:
        partitions: the partitions of all servers, shared by all workers. Make the worker of rank 0
            first: it fills this list.
    """

    def __init__(self, start: ReplayStart, rank: int, partitions: list[PartitionState]) -> None:
        # Samples are the same with any number of data-loader workers.
        job = self.job = replace(start.job, data=replace(start.job.data, workers=0))
        ranks = len(start.private)
        local_world = int(start.info.get("local_world", ranks))
        mesh = _SingleRankAxis(
            rank=rank,
            size=ranks,
            device=torch.device(start.info["device"]),
            place=replace(read_place(os.environ), world=ranks, local_world=local_world),
        )
        seed_all(job.seed)
        built = build(job, mesh.device)
        strategies = _strategies(job, partitions)
        self._strategy = next(s for s in strategies if isinstance(s, _ReplayStrategy))
        settings = RunSettings(job.seed, job.train.accumulate)
        self.run = Run(mesh, strategies, settings, loss_scale=None, announce=_ignore)
        optimizer = optimizers.build(job.optimizer, built.model, job.train.batch_size)
        self.model, self.optimizer, self.loader = self.run.prepare(
            built.model, optimizer, built.train_loader
        )
        # The bits are compared at the end; other data is one way to come to others.
        self.run.load_state(start.tensors, start.info, start.private[rank], accept_data=True)
        self.compute_loss = built.task.compute_loss(self.model)
        self.partitions = partitions
        # All workers share this process, so each brings its random state with each step.
        self.random = random_state(mesh.device)
        self._steps_taken = start.step
        self._steps = self._all_steps()

    def take(self, partition: int, values: Tensor) -> None:
        """Let the next step begin with these values of a partition."""
        self._strategy.servers.take(partition, values)

    def step(self) -> ReplayStep:
        """Take the next step of this worker. Return what it pushed."""
        load_random_state(self.random, self.run.device)
        next(self._steps)
        self.random = random_state(self.run.device)
        return self._strategy.servers.stepped()

    def buffers(self) -> list[Tensor]:
        """Return copies of the model's buffers."""
        return [buffer.clone() for buffer in self.model.buffers()]

    def load_buffers(self, buffers: list[Tensor]) -> None:
        """Load what `buffers` of another worker returned."""
        for buffer, other in zip(self.model.buffers(), buffers, strict=True):
            buffer.copy_(other)

    def _all_steps(self) -> Iterator[None]:
        """Take the steps of `shoal.train.loop.Training`, without all that changes no weight."""
        job = self.job
        epoch_steps = [self.loader.batches_in(epoch) for epoch in range(job.train.epochs)]
        total = min(sum(epoch_steps), job.train.max_steps or sum(epoch_steps))
        while self._steps_taken < total:
            epoch = self.loader.epoch
            first = self._steps_taken - sum(epoch_steps[:epoch])
            for index, batch in enumerate(self.loader, start=first):
                inputs, target = self.run.to_device(batch)
                epochs = epoch + index / epoch_steps[epoch]
                progress = self._steps_taken / total
                set_learning_rate(self.optimizer, factor(job.schedule, epochs, progress))
                self.optimizer.zero_grad()
                self.run.forward_backward(self.compute_loss, inputs, target)
                self.optimizer.step()
                self._steps_taken += 1
                yield


def _strategies(job: Job, partitions: list[PartitionState]) -> list[Strategy]:
    """Return the strategies in the order of `shoal.init`, with a replay in place of servers."""
    chosen = [
        _ReplayStrategy(strategy, partitions) if isinstance(strategy, Server) else strategy
        for strategy in build_strategies(parse_line(job.strategy))
    ]
    compiled: list[Strategy] = [Compile()] if job.model.compile else []
    return [
        Precision(job.train.precision, None),
        *compiled,
        *chosen,
        Accumulate(job.train.accumulate),
    ]


class _ReplayStrategy(Strategy):
    """Stands in for the strategy `Server`: the same worker, with servers in this process.

    Attributes:
        servers: are there once the optimizer is attached.
    """

    servers: ReplayedServers

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

    def _connect(self, engine: WorkerEngine, spec: OptimizerSpec) -> WorkerClient:
        self.servers = ReplayedServers(engine.flat, spec, self.partitions, engine.compression)
        return WorkerClient(engine.flat, self.servers, engine.staleness)


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

    def all_gather_str(self, text: str) -> list[str]:
        return [text] * self.size

    def new_group(self) -> dist.ProcessGroup | None:
        return None

    def barrier(self) -> None:
        pass


def _ignore(_: str) -> None:
    """Print nothing: the recorded run has printed its startup summary."""
