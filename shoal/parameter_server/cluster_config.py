"""Settings of a job's servers and of its coordinator, the same for all their processes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from shoal.parameter_server.optimizer_spec import OptimizerSpec, kind_of_name, name_of_kind
from shoal.parameter_server.partitioning import ParamSlice, Partition
from shoal.parameter_server.transport.key import derived_key
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
        compress: the encoding of the gradients that workers push.
    """

    parts: tuple[Partition, ...]
    recipe: OptimizerSpec
    workers: int
    staleness: int | None
    lease_s: float
    compress: str = "none"


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

    def to_json(self) -> str:
        """Return what servers on other hosts must know, without the key.

        Raises: StrategyRefused: they cannot import the optimizer's class.
        """
        settings = self.settings
        fields = {
            "job": self.transport.job,
            "encrypt": self.transport.encrypt,
            "owners": self.owners,
            "shards": self.shards,
            "replicas": self.replicas,
            "workers": settings.workers,
            "staleness": settings.staleness,
            "lease_s": settings.lease_s,
            "compress": settings.compress,
            "optimizer": [name_of_kind(settings.recipe.kind), settings.recipe.settings],
            "parts": [
                [part.group, str(part.dtype).removeprefix("torch."), part.segments]
                for part in settings.parts
            ],
        }
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str, secret: bytes) -> ClusterConfig:
        """Read the result of `to_json`. It has no folder, so no coordinator can use it.

        Args: secret: of the launch, from which the key follows.

        Raises: ConfigError: the optimizer's class cannot be imported here.
        """
        fields = json.loads(text)
        parts = tuple(
            Partition(number, group, getattr(torch, dtype), tuple(ParamSlice(*s) for s in slices))
            for number, (group, dtype, slices) in enumerate(fields["parts"])
        )
        (kind, settings), job = fields["optimizer"], fields["job"]
        shared = {key: fields[key] for key in ("workers", "staleness", "lease_s", "compress")}
        return cls(
            Transport(derived_key(secret, job), job, encrypt=fields["encrypt"]),
            Path(),
            ShardSettings(parts, OptimizerSpec(kind_of_name(kind), settings), **shared),
            tuple(fields["owners"]),
            fields["shards"],
            fields["replicas"],
        )
