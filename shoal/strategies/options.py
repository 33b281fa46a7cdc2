"""What can be asked of each strategy, and what of it makes no sense whatever the model and the
world.

Each strategy is one of these classes and knows how it is done. This file needs no torch, so that a
bad value is said before any process is started. Each class raises ConfigError with all that is
wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from shoal.comm import compression_spec
from shoal.comm.algorithms.algorithm_names import refuse_unknown
from shoal.errors import ConfigError
from shoal.strategies.pipeline.schedules import SCHEDULES, problems

PARALLEL_STYLES = ("column", "row")
_MOST_CONNECTIONS = 16
_NO_TLS = (
    "servers no longer encrypt their connections. Both ends prove that they hold the key of this "
    "job, and between machines every frame is authenticated (docs/security.md), but who can listen "
    "sees gradients and weights. Leave tls out; where that matters, use a network that encrypts, "
    "such as WireGuard or IPsec"
)


class StrategyOptions:
    """Options of a strategy: the fields of a dataclass.

    Attributes:
        value: name of the option that `name=value` sets; empty where a strategy takes no value.
    """

    value: ClassVar[str] = ""

    @property
    def mesh_dims(self) -> dict[str, int]:
        """Sizes of the mesh axes that it spans, such as {"tensor": 2}; see
        `shoal.comm.parallel_dims`.
        """
        return {}


def mesh_sizes(strategies: Iterable[StrategyOptions]) -> dict[str, int]:
    """Sizes of the mesh axes that strategies span. The mesh is made before anything is cut."""
    return {axis: size for strategy in strategies for axis, size in strategy.mesh_dims.items()}


@dataclass(frozen=True)
class NoOptions(StrategyOptions):
    """Nothing can be asked."""


@dataclass(frozen=True)
class PipelineOptions(StrategyOptions):
    """Args:
    ranks: of each pipeline.
    schedule: naive, gpipe, 1f1b, interleaved, zero-bubble or zbv; `shoal schedule NAME` draws it.
    microbatches: parts that a rank's share of the batch is split in; 0 to choose.
    stages: on each rank, for interleaved and zero-bubble; 0 for the schedule's own number.
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

    def __post_init__(self) -> None:
        found = []
        if self.balance not in ("time", "parameters"):
            found.append(f"balance={self.balance}: by time or by parameters")
        if self.microbatches < 0:
            found.append(f"microbatches={self.microbatches}: must not be negative; 0 to choose")
        # Not chosen as yet, but one micro-batch is a table of every schedule.
        found += problems(self.schedule, self.ranks, max(self.microbatches, 1), self.stages)
        if self.cuts and self.schedule in SCHEDULES:
            num_stages = self.ranks * (self.stages or SCHEDULES[self.schedule].per_rank)
            begun = len(self.cuts.split("/"))
            if begun != num_stages - 1:
                said = f"names begin as many stages; {num_stages} stages need {num_stages - 1}"
                found.append(f"cuts={self.cuts}: {begun} {said}")
        _refuse(found)

    @property
    def mesh_dims(self) -> dict[str, int]:
        return {"pipeline": self.ranks}


@dataclass(frozen=True)
class TensorOptions(StrategyOptions):
    """Args:
    degree: ranks in each tensor group; a number that divides the world, and the ranks of each
    machine.
    whole: patterns of names, with + between them: modules that stay whole, with all that is in
    them.
    cut_by: a plan of one's own, PATTERN:column and PATTERN:row with + between them; nothing else is
    cut then.
    sequence: between what is cut, the stream lies in slices of the sequence.
    """

    value: ClassVar[str] = "degree"
    degree: int = 2
    whole: str = ""
    cut_by: str = ""
    sequence: bool = False

    def __post_init__(self) -> None:
        found = [] if self.degree > 0 else [f"tensor={self.degree}: must be 1 or more"]
        wrong = [
            f"{pattern}:{how}" if how else pattern
            for pattern, how in self.plan
            if how not in PARALLEL_STYLES or not pattern
        ]
        _refuse(
            found + [f"cut_by: '{word}' is not PATTERN:column or PATTERN:row" for word in wrong]
        )

    @property
    def mesh_dims(self) -> dict[str, int]:
        return {"tensor": self.degree}

    @property
    def plan(self) -> list[tuple[str, str]]:
        """The patterns of `cut_by`, and how what they match is cut."""
        words = [word.strip() for word in self.cut_by.split("+") if word.strip()]
        return [
            (pattern, how) if colon else (how, "")
            for pattern, colon, how in (w.rpartition(":") for w in words)
        ]


@dataclass(frozen=True)
class RecomputeOptions(StrategyOptions):
    """Args:
    every: each k-th unit; 1 for all of them.
    budget_mb: MiB of activations that one micro-batch may keep, over all units; 0 to recompute
        whatever `every` says. Measured in the first step, which keeps activations in CPU memory.
    unit: class name of the modules that are recomputed as a whole; empty for the rule in `units`.
    """

    value: ClassVar[str] = "every"
    every: int = 1
    budget_mb: float = 0.0
    unit: str = ""

    def __post_init__(self) -> None:
        if self.every < 1 or not self.budget_mb >= 0:
            asked = f"recompute={self.every},budget_mb={self.budget_mb:g}"
            _refuse(
                [f"{asked}: every k-th unit with k from 1 on, and a budget that is not negative"]
            )


@dataclass(frozen=True)
class DdpOptions(StrategyOptions):
    """Args:
    unused: search in every step for parameters that get no gradient. Needed only where it changes
        from step to step which ones these are; parameters that never get one are found by
        themselves.
    bucket_mb: size of the buckets that gradients are reduced in, in MiB.
    allreduce: the algorithm: ring, tree, halving-doubling or hierarchical; backend leaves it to
        the process group.
    table: is accepted beside allreduce=auto, which older configurations hold, and is not read.
    compress: what gradients become on their way: none, bf16, fp16, topk=FRACTION, onebit or
        powersgd=RANK. Not exact.
    """

    unused: bool = False
    bucket_mb: float = 25.0
    allreduce: str = "backend"
    table: str = ""
    compress: str = "none"

    def __post_init__(self) -> None:
        found = (
            []
            if 0 < self.bucket_mb < inf
            else [f"bucket_mb={self.bucket_mb:g}: must be greater than 0, and finite"]
        )
        found += _problems_of(lambda: refuse_unknown(self.allreduce, self.table))
        _refuse(found + _problems_of(lambda: compression_spec.read(self.compress, powersgd=True)))


@dataclass(frozen=True)
class ZeroOptions(StrategyOptions):
    """Args:
    hybrid: shard inside groups of so many ranks, and replicate across groups; 0 for one group of
    all.
    offload: keep this rank's shards of parameters, gradients and optimizer states in CPU memory.
    unit: class name of the modules that are gathered at once; empty for the rule in `units`.
    """

    hybrid: int = 0
    offload: bool = False
    unit: str = ""

    def __post_init__(self) -> None:
        _refuse(
            []
            if self.hybrid >= 0
            else [f"hybrid={self.hybrid}: must not be negative; 0 for one group of all"]
        )

    @property
    def mesh_dims(self) -> dict[str, int]:
        return {"dp_shard": self.hybrid}


@dataclass(frozen=True)
class ServerOptions(StrategyOptions):
    """Args:
    servers: how many share the parameters: the number of shards.
    replicas: how many hold each shard. With 2, the loss of any one server loses nothing, and
    training goes on.
    staleness: how many steps a worker may be ahead of the slowest one. "0" is synchronous and
        exact; "async" sets no bound. Where it is not 0, each push is a step of its own at 1/workers
        of the learning rate.
    compress: what pushed gradients become on the wire: none, bf16, fp16, topk=FRACTION or onebit.
    Not exact.
    part_mb: the most that is pushed and pulled as one, in MiB. Small models are cut into smaller
        parts: on one machine about one a server, so that one that is added may find none; between
        machines about four.
    lease_s: how long a server may be silent before another takes over.
    shared_memory: workers and servers of one machine read each other's memory instead of sending
    it.
    aggregate: where there are several machines with several workers, those of one sum their
        gradients before they push, and share one pull; synchronous steps without compression only.
    connections: has no effect any more, and is accepted from 1 to 16 for configurations and
        checkpoints that name it.
    tls: only none; a certificate is refused, for connections are authenticated and not encrypted.
    """

    value: ClassVar[str] = "servers"
    servers: int = 1
    replicas: int = 1
    staleness: str = "0"
    compress: str = "none"
    part_mb: float = 4.0
    lease_s: float = 2.0
    shared_memory: bool = True
    aggregate: bool = True
    connections: int = 1
    tls: str = "none"

    def __post_init__(self) -> None:
        found = (
            []
            if self.servers > 0
            else [f"server={self.servers}: there must be at least one server"]
        )
        if self.replicas < 1:
            found.append(f"replicas={self.replicas}: there must be at least one of each shard")
        if not 0 < self.lease_s < inf:
            found.append(f"lease_s={self.lease_s}: must be greater than 0, and finite")
        if self.staleness != "async" and not self.staleness.isdecimal():
            found.append(
                f"staleness={self.staleness}: a number of steps, 0 for synchronous ones, or async"
            )
        if not 0 < self.part_mb < inf:
            found.append(f"part_mb={self.part_mb}: must be greater than 0, and finite")
        if not 1 <= self.connections <= _MOST_CONNECTIONS:
            found.append(f"connections={self.connections}: must be from 1 to {_MOST_CONNECTIONS}")
        if self.tls != "none":
            found.append(f"tls={self.tls}: {_NO_TLS}")
        _refuse(found + _problems_of(lambda: compression_spec.read(self.compress)))


@dataclass(frozen=True)
class LocalOptions(StrategyOptions):
    """Args: every: H, how many optimizer steps there are from one meeting to the next."""

    value: ClassVar[str] = "every"
    name: ClassVar[str] = "local"
    every: int = 16

    def __post_init__(self) -> None:
        _refuse(self._problem())

    def _problem(self) -> list[str]:
        return (
            []
            if self.every > 0
            else [f"{self.name}={self.every}: there must be at least one step between meetings"]
        )


@dataclass(frozen=True)
class DilocoOptions(LocalOptions):
    """Args:
    every: H, how many optimizer steps there are from one meeting to the next.
    outer_lr: rate of the outer optimizer.
    outer_momentum: its Nesterov momentum. With a rate of 1 and 0 here it is `local`.
    """

    name: ClassVar[str] = "diloco"
    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    def _problem(self) -> list[str]:
        found = super()._problem()
        found += (
            []
            if 0 < self.outer_lr < inf
            else [f"outer_lr={self.outer_lr}: must be greater than 0, and finite"]
        )
        fits = 0 <= self.outer_momentum < 1
        return found + (
            []
            if fits
            else [f"outer_momentum={self.outer_momentum}: must be at least 0 and less than 1"]
        )


def _problems_of(check: Callable[[], object]) -> list[str]:
    """What a check complains about."""
    try:
        check()
    except ConfigError as error:
        return [*error.problems]
    return []


def _refuse(found: Sequence[str]) -> None:
    if found:
        raise ConfigError(found)
