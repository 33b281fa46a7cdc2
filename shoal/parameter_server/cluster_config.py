"""Settings of a job's servers and of its coordinator, the same for all their processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shoal.comm.compression.base import Compression
from shoal.parameter_server.optimizer_spec import OptimizerSpec
from shoal.parameter_server.partitioning import Partition
from shoal.parameter_server.transport.settings import Transport


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


@dataclass(frozen=True)
class ClusterConfig:
    """Settings of a job's coordinator and servers.

    Args:
        transport: with a name that no other job has.
        folder: for the coordinator's file.
        settings: of all shards.
        owners: the shard of each partition at the beginning.
        shards: number of shards at the beginning.
        replicas: servers of each shard.
    """

    transport: Transport
    folder: Path
    settings: ShardSettings
    owners: tuple[int, ...]
    shards: int
    replicas: int = 1

    @property
    def views_file(self) -> Path:
        """Return where the coordinator saves its decisions, and reads them after a restart."""
        return self.folder / f"views-{self.transport.job}.json"
