"""Settings of a training run, the same for every server of every shard."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.comm.compression import Compression
from shoal.parameter_server.optimizer_spec import OptimizerSpec
from shoal.parameter_server.partitioning import Partition


@dataclass(frozen=True)
class ShardSettings:
    """Settings that all shards of a job share.

    Args:
        parts: partitions of the model.
        recipe: the optimizer that the servers apply.
        workers: number of workers that push.
        staleness: steps that a worker may be ahead; 0 for synchronous steps, None for any number.
        lease_s: seconds for which a server may be silent before another takes over.
        compression: of the gradients that workers push.
    """

    parts: tuple[Partition, ...]
    recipe: OptimizerSpec
    workers: int
    staleness: int | None
    lease_s: float
    compression: Compression | None = None
