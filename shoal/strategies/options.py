"""Options of strategies, and checks of their values that need no model and no world.

      class Ddp(DdpOptions, Strategy)     a strategy inherits its options

This file imports no torch, so a bad value is an error before any process is started: a ConfigError
with all problems of a strategy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from shoal.comm import compression_spec
from shoal.errors import did_you_mean, problems_of, raise_problems
from shoal.strategies.pipeline.schedules import SCHEDULES, problems


class StrategyOptions:
    """Options of a strategy, which are the fields of a dataclass.

    Attributes:
        value: name of the option that `name=value` sets. Empty if the strategy takes no value.
    """

    value: ClassVar[str] = ""

    def __post_init__(self) -> None:
        raise_problems(list(self._problems()))

    def _problems(self) -> Iterator[str]:
        """Yield what no model and no world could use."""
        yield from ()

    @property
    def mesh_dims(self) -> dict[str, int]:
        """Sizes of the mesh axes that the strategy spans, such as {"tensor": 2}.

        See `shoal.comm.parallel_dims`.
        """
        return {}

    @classmethod
    def variants(cls, name: str, ranks: int) -> list[str]:
        """Return the texts of this strategy that `shoal plan` compares on so many ranks.

        Args: name: under which the strategy is registered.
        """
        return [name]


def _positive(name: str, value: float, shown: str = "") -> Iterator[str]:
    """Yield a problem for a value that is not above 0, or not finite."""
    if not 0 < value < inf:
        yield f"{name}={shown or value}: must be greater than 0, and finite"


def divisors(number: int) -> list[int]:
    """Return the divisors of a number above 1, itself included."""
    return [each for each in range(2, number + 1) if number % each == 0]


def mesh_sizes(strategies: Iterable[StrategyOptions]) -> dict[str, int]:
    """Return the sizes of all mesh axes. The mesh is made before strategies apply."""
    return {axis: size for strategy in strategies for axis, size in strategy.mesh_dims.items()}


@dataclass(frozen=True)
class NoOptions(StrategyOptions):
    """A strategy without options."""


@dataclass(frozen=True)
class RecomputeOptions(StrategyOptions):
    """Options of activation checkpointing.

    Args:
        every: recompute each k-th unit; 1 for all units.
        unit: class name of the modules that are recomputed; empty for the rule in `units`.
    """

    value: ClassVar[str] = "every"
    every: int = 1
    unit: str = ""

    def _problems(self) -> Iterator[str]:
        if self.every < 1:
            yield f"recompute={self.every}: every k-th unit, with k from 1 on"


ALLREDUCES = ("backend", "ring", "tree", "hierarchical")
"""Algorithms of ddp; `backend` is the all-reduce of the process group itself."""


@dataclass(frozen=True)
class DdpOptions(StrategyOptions):
    """Options of distributed data parallel.

    Args:
        unused: search in every step for parameters without a gradient. Needed only if these change
            from step to step. The first step finds parameters that never get one.
        bucket_mb: size of gradient buckets, in MiB.
        allreduce: the algorithm: ring, tree or hierarchical. `backend` leaves the choice to
            the process group.
        compress: encoding of gradients in messages: none, bf16, fp16, topk=FRACTION, onebit or
            powersgd=RANK. Every one but none is inexact.
    """

    unused: bool = False
    bucket_mb: float = 25.0
    allreduce: str = "backend"
    compress: str = "none"

    def _problems(self) -> Iterator[str]:
        yield from _positive("bucket_mb", self.bucket_mb, f"{self.bucket_mb:g}")
        if self.allreduce not in ALLREDUCES:
            hint = did_you_mean(self.allreduce, ALLREDUCES)
            yield f"allreduce={self.allreduce}: not known; {hint}"
        yield from problems_of(lambda: compression_spec.read(self.compress, powersgd=True))


@dataclass(frozen=True)
class ZeroOptions(StrategyOptions):
    """Options of ZeRO 1, 2 and 3.

    Args:
        hybrid: ranks of each group that shards; groups replicate each other. 0 for one group of all
            ranks.
        offload: keep this rank's shards of parameters, gradients and optimizer states in CPU
            memory.
        unit: class name of the modules that are gathered at once; empty for the rule in `units`.
        gather: dtype in which parameters are gathered, "bf16"; empty for their own.
    """

    hybrid: int = 0
    offload: bool = False
    unit: str = ""
    gather: str = ""

    def _problems(self) -> Iterator[str]:
        if self.hybrid < 0:
            yield f"hybrid={self.hybrid}: must not be negative; 0 for one group of all"
        if self.gather not in ("", "bf16"):
            yield f"gather={self.gather}: must be bf16; leave it out for their own dtype"

    @property
    def mesh_dims(self) -> dict[str, int]:
        return {"dp_shard": self.hybrid}


@dataclass(frozen=True)
class LocalOptions(StrategyOptions):
    """Options of local SGD.

    Args: every: H, optimizer steps from one sync round to the next.
    """

    value: ClassVar[str] = "every"
    name: ClassVar[str] = "local"
    every: int = 16

    @classmethod
    def variants(cls, name: str, ranks: int) -> list[str]:
        return [f"{name}=16"]

    def _problems(self) -> Iterator[str]:
        if self.every <= 0:
            yield f"{self.name}={self.every}: there must be at least one step between meetings"


@dataclass(frozen=True)
class DilocoOptions(LocalOptions):
    """Options of DiLoCo.

    Args:
        every: H, optimizer steps from one sync round to the next.
        outer_lr: learning rate of the outer optimizer.
        outer_momentum: its Nesterov momentum. With a rate of 1 and a momentum of 0 it is `local`.
    """

    name: ClassVar[str] = "diloco"
    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        yield from _positive("outer_lr", self.outer_lr)
        if not 0 <= self.outer_momentum < 1:
            yield f"outer_momentum={self.outer_momentum}: must be at least 0 and less than 1"


ONE_RANK = "strategy single trains on one rank; there are {ranks}. Use ddp, or start one process."
ONE_PROCESS = (
    "strategy dataparallel is one process that computes on several GPUs; there are {ranks} ranks. "
    "Use ddp, or start one process."
)
MAX_SERVERS = 1024
WHOLE_PARAMETERS = (
    "strategy server owns whole parameters; under tensor and pipeline no rank has them. Use ddp or "
    "zero1."
)


@dataclass(frozen=True)
class ServerOptions(StrategyOptions):
    """Options of parameter servers.

    Args:
        servers: number of servers, and of the shards that they own.
        replicas: servers that hold each shard. With 2, the loss of any one server loses no state,
            and training continues.
        staleness: steps that a worker may be ahead of the slowest one. "0" is synchronous and
            exact; "async" sets no bound. If it is not 0, each push is a step of its own, with
            1/workers of the learning rate.
        compress: encoding of pushed gradients: none, bf16, fp16, topk=FRACTION or onebit. Every one
            but none is inexact.
        part_mb: maximum size of a partition, in MiB. Small models have smaller partitions: on one
            machine about one for each server, between machines about four. A server that is added
            on one machine may find none to take.
        lease_s: seconds for which a server may be silent before another one takes over.
        shared_memory: workers and servers of one machine read each other's memory, without
            messages.
        encrypt: use TLS 1.3 between machines. Without it, who can listen on the network reads
            gradients and weights and can send others.
    """

    value: ClassVar[str] = "servers"
    servers: int = 1
    replicas: int = 1
    staleness: str = "0"
    compress: str = "none"
    part_mb: float = 4.0
    lease_s: float = 2.0
    shared_memory: bool = True
    encrypt: bool = True

    @classmethod
    def variants(cls, name: str, ranks: int) -> list[str]:
        return [f"{name}={servers}" for servers in sorted({1, max(ranks // 2, 1), ranks})]

    def _problems(self) -> Iterator[str]:
        if self.servers <= 0:
            yield f"server={self.servers}: there must be at least one server"
        if self.replicas < 1:
            yield f"replicas={self.replicas}: there must be at least one of each shard"
        if max(self.servers, self.replicas) > MAX_SERVERS:
            given = f"server={self.servers},replicas={self.replicas}"
            yield f"{given}: there may be up to {MAX_SERVERS:,} of each"
        yield from _positive("lease_s", self.lease_s)
        is_number = self.staleness.isdecimal() and len(self.staleness) < 19
        if self.staleness != "async" and not is_number:
            yield f"staleness={self.staleness}: a number of steps, 0 for synchronous ones, or async"
        yield from _positive("part_mb", self.part_mb)
        yield from problems_of(lambda: compression_spec.read(self.compress))


MANY_RANKS = 16
"""Ranks of a pipeline above which `shoal plan` compares its default schedule alone."""


@dataclass(frozen=True)
class PipelineOptions(StrategyOptions):
    """Options of pipeline parallelism.

    Args:
        ranks: ranks of each pipeline.
        schedule: naive, gpipe, 1f1b, interleaved, zero-bubble or zbv. `shoal schedule` draws it.
        microbatches: micro-batches of the local batch; 0 to choose.
        stages: stages on each rank, for interleaved and zero-bubble; 0 for the schedule's default.
        balance: time (forward and backward, measured on a sample) or parameters.
        cuts: names of the modules that begin stages, as in layer2.0/layer4; empty to balance.
    """

    value: ClassVar[str] = "ranks"
    ranks: int = 2
    schedule: str = "1f1b"
    microbatches: int = 0
    stages: int = 0
    balance: str = "time"
    cuts: str = ""

    def _problems(self) -> Iterator[str]:
        if self.balance not in ("time", "parameters"):
            yield f"balance={self.balance}: by time or by parameters"
        if self.microbatches < 0:
            yield f"microbatches={self.microbatches}: must not be negative; 0 to choose"
        # 0 is resolved later. Every schedule has a table for one micro-batch, so check that.
        yield from problems(self.schedule, self.ranks, max(self.microbatches, 1), self.stages)
        if self.cuts and self.schedule in SCHEDULES:
            stages, num_cuts = self.num_stages, len(self.cut_names)
            if num_cuts != stages - 1:
                need = f"names begin as many stages; {stages} stages need {stages - 1}"
                yield f"cuts={self.cuts}: {num_cuts} {need}"

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.ranks * (self.stages or SCHEDULES[self.schedule].per_rank)

    @property
    def cut_names(self) -> list[str]:
        return self.cuts.split("/") if self.cuts else []

    @property
    def mesh_dims(self) -> dict[str, int]:
        return {"pipeline": self.ranks}

    @classmethod
    def variants(cls, name: str, ranks: int) -> list[str]:
        others = ("gpipe", "interleaved", "zero-bubble", "zbv")
        schedules = [f",schedule={schedule}" for schedule in others]
        # Tables of long pipelines take seconds to make, and schedules differ by their bubbles.
        return [
            f"{name}={p}{schedule}"
            for p in divisors(ranks)
            for schedule in ["", *(schedules if p <= MANY_RANKS else [])]
        ]


@dataclass(frozen=True)
class TensorOptions(StrategyOptions):
    """Options of tensor parallelism.

    Args:
        degree: ranks in each tensor group. Divides the world size, and the ranks of each machine.
        whole: patterns of module names, with + between them. These modules are replicated, with all
            modules inside.
        sequence: sequence parallel: activations between divided layers are sharded along the
            sequence.
    """

    value: ClassVar[str] = "degree"
    degree: int = 2
    whole: str = ""
    sequence: bool = False

    def _problems(self) -> Iterator[str]:
        if self.degree <= 0:
            yield f"tensor={self.degree}: must be 1 or more"

    @property
    def mesh_dims(self) -> dict[str, int]:
        return {"tensor": self.degree}

    @classmethod
    def variants(cls, name: str, ranks: int) -> list[str]:
        degrees = [f"{name}={degree}" for degree in divisors(ranks)]
        return [text + option for text in degrees for option in ("", ",sequence=true")]
