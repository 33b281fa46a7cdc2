"""Settings of a training run that every server of every shard has."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.comm.compression import Compression
from shoal.parameter_server.optimizer_spec import OptimizerSpec
from shoal.parameter_server.partitioning import Partition


@dataclass(frozen=True)
class ShardSettings:
    """Settings that all shards of a job share.

    Args:
        parts: of the model.
        recipe: the optimizer that the servers apply.
        workers: how many push.
        staleness: as for `Shard`.
        lease_s: how long a server may be silent before another takes over.
        compression: of what is pushed.
    """

    parts: tuple[Partition, ...]
    recipe: OptimizerSpec
    workers: int
    staleness: int | None
    lease_s: float
    compression: Compression | None = None
