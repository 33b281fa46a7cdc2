"""The start of servers for one worker's partitions, and its connections to them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.parameter_server.launcher.server_pool import ClusterConfig
from shoal.parameter_server.optimizer_spec import OptimizerSpec
from shoal.parameter_server.partitioning import assign
from shoal.parameter_server.shard_settings import ShardSettings
from shoal.parameter_server.transport.settings import Transport
from shoal.parameter_server.worker.client import WorkerClient, connect_to_servers
from shoal.parameter_server.worker.push_trace import PushTrace

if TYPE_CHECKING:
    from shoal.strategies.server.worker_engine import WorkerEngine


def start_servers(engine: WorkerEngine, recipe: OptimizerSpec) -> WorkerClient:
    """Start servers for an engine's partitions, and connect to them. Collective."""
    options = engine.options
    flat = engine.flat
    staleness = engine.staleness
    owners = tuple(assign(flat.parts, options.servers))

    def make_config(transport: Transport, folder: Path, workers: int) -> ClusterConfig:
        settings = ShardSettings(
            tuple(flat.parts), recipe, workers, staleness, options.lease_s, engine.compression
        )
        return ClusterConfig(transport, folder, settings, owners, options.servers, options.replicas)

    job, arbiter = engine.launcher.start(make_config)
    # Ranks whose pushes a step waits for, in the trace.
    ranks = range(engine.mesh.size) if engine.is_synchronous else ()
    peers = tuple(rank for rank in ranks if rank != engine.mesh.rank)
    return connect_to_servers(
        engine.launcher.worker,
        flat,
        arbiter,
        job.transport,
        staleness=staleness,
        shares=options.shared_memory and engine.compression is None,
        trace=PushTrace(engine.mesh.recorder, peers),
    )
