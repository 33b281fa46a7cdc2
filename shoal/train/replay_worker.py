"""One worker of a recorded run, taken a step at a time: its own model, data and random numbers,
and nobody else.
"""

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
    """Rank `rank` of a recorded run, as it was before its first step.

    Args: held: the parts of all servers, shared by all workers; rank 0 comes first, and fills them.
    """

    def __init__(self, start: ReplayStart, rank: int, held: list[PartitionState]) -> None:
        job = self.job = replace(
            start.job, data=replace(start.job.data, workers=0)
        )  # they change no sample
        ranks = len(start.private)
        machine = int(start.info.get("local_world", ranks))
        mesh = _SingleRankAxis(
            rank=rank,
            size=ranks,
            device=torch.device(start.info["device"]),
            place=replace(read_place(os.environ), world=ranks, local_world=machine),
        )
        seed_all(job.seed)
        built = build(job, mesh.device)
        strategies = _strategies(job, held)
        self._servers = next(s for s in strategies if isinstance(s, _ReplayStrategy))
        self.run = Run(mesh, strategies, RunSettings(job.seed, job.train.accumulate), None, _silent)
        optimizer = optimizers.build(job.optimizer, built.model, job.train.batch_size)
        self.model, self.optimizer, self.loader = self.run.prepare(
            built.model, optimizer, built.train_loader
        )
        self.run.load_state(start.tensors, start.info, start.private[rank])
        self.task, self.held = built.task, held
        self.random = random_state(mesh.device)
        self._taken = start.step
        self._steps = self._all_steps()

    def take(self, part: int, values: Tensor) -> None:
        """Begin the next step with these values of a part."""
        self._servers.replayed.take(part, values)

    def step(self) -> ReplayStep:
        """The next step of this worker: what it pushed there."""
        load_random_state(self.random)
        next(self._steps)
        self.random = random_state(self.run.device)
        return self._servers.replayed.stepped()

    def buffers(self) -> list[Tensor]:
        """Copies."""
        return [buffer.clone() for buffer in self.model.buffers()]

    def load_buffers(self, buffers: list[Tensor]) -> None:
        """The inverse."""
        for own, other in zip(self.model.buffers(), buffers, strict=True):
            own.copy_(other)

    def _all_steps(self) -> Iterator[None]:
        """As `shoal.train.loop.Training` takes them, without all that changes no weight."""
        job = self.job
        epoch_steps = [self.loader.batches_in(epoch) for epoch in range(job.train.epochs)]
        total = min(sum(epoch_steps), job.train.max_steps or sum(epoch_steps))
        while self._taken < total:
            epoch = self.loader.epoch
            first = self._taken - sum(epoch_steps[:epoch])
            for index, batch in enumerate(self.loader, start=first):
                inputs, target = self.run.to_device(batch)
                epochs = epoch + index / epoch_steps[epoch]
                set_learning_rate(self.optimizer, factor(job.schedule, epochs, self._taken / total))
                self.optimizer.zero_grad()
                self.run.forward_backward(
                    self.task.loss, self.model, inputs, target, measure=self.task.num_correct
                )
                self.optimizer.step()
                self._taken += 1
                yield


def _strategies(job: Job, held: list[PartitionState]) -> list[Strategy]:
    """As `shoal.run.begin` puts them together, with a stand-in for the servers."""
    chosen = [
        _ReplayStrategy(s, held) if isinstance(s, Server) else s
        for s in build_strategies(parse_line(job.strategy))
    ]
    compiled: list[Strategy] = [Compile()] if job.model.compile else []
    return [
        Precision(job.train.precision, None),
        *compiled,
        *chosen,
        Accumulate(job.train.accumulate),
    ]


class _ReplayStrategy(Strategy):
    """Cuts as `Server` with the same options does.

    Attributes: replayed: in place of servers, once the optimizer is known.
    """

    replayed: ReplayedServers

    def __init__(self, options: Server, held: list[PartitionState]) -> None:
        self.options, self.held = options, held

    def apply_strategies(self, part: LocalModel, mesh: Mesh) -> LocalModel:
        engine = WorkerEngine(self.options, part, mesh, self._connect)
        return replace(
            part,
            forward=engine.forward,
            run=engine.run,
            gather_params=engine.gather,
            remote_optimizer=engine,
            strategy_state=engine,
        )

    def _connect(self, engine: WorkerEngine, recipe: OptimizerSpec) -> WorkerClient:
        self.replayed = ReplayedServers(engine.flat, recipe, self.held, engine.compression)
        return WorkerClient(engine.flat, self.replayed, engine.staleness)


@dataclass(frozen=True)
class _SingleRankAxis(Mesh):
    """One rank of several, whose others are elsewhere in this process: what is collective has
    been said.
    """

    def all_reduce(self, tensor: Tensor) -> Tensor:
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


def _silent(_: str) -> None:
    """The run itself has said what there is to say."""
