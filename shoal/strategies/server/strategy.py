"""Parameter servers: workers push gradients, servers step, workers pull values.

      worker 0   forward ── backward ─ request ─ ─  forward of the next step waits, layer by layer
                        push ↘  ↘  ↘      │      ↗  ↗  ↗ pull
      server a             sum ── sum ──  step ──
      server b             sum ──── sum ─ step ──
                        push ↗  ↗  ↗      │      ↘  ↘  ↘ pull
      worker 1   forward ── backward ─ request ─ ─  forward ...

      strategy.py              the strategy and its checks
      worker_engine.py         a step of one worker, and its state for checkpoints
      gradient_pusher.py       pushes during the backward pass
      shoal/parameter_server   the servers, and the workers' connections to them

Sources: Li et al., OSDI 2014 (the architecture); Ho et al., NIPS 2013 (bounded staleness); Jiang et
al., OSDI 2020 (push in the order of the backward pass, pull in that of the forward pass)."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from dataclasses import replace
from typing import ClassVar
from weakref import finalize

import torch

from shoal.comm.mesh import Mesh, register_cleanup
from shoal.costs.step_cost import SentMessage, StepCost
from shoal.errors import StrategyRefused
from shoal.parameter_server.cluster_config import ClusterConfig, ShardSettings
from shoal.parameter_server.launcher import ClusterLauncher, spans_machines
from shoal.parameter_server.optimizer_spec import OptimizerSpec
from shoal.parameter_server.partitioning import ParamMeta, assign, partition, partition_bytes
from shoal.parameter_server.transport.key import MISSING_PACKAGE, can_encrypt
from shoal.parameter_server.worker.client import WorkerClient
from shoal.parameter_server.worker.socket_network import SocketNetwork
from shoal.platform.tensors import MIB
from shoal.strategies.base import LocalModel, Strategy
from shoal.strategies.grad_checks import check_real_parameters
from shoal.strategies.loss_terms import LOOP_IN_SERVERS
from shoal.strategies.options import WHOLE_PARAMETERS, ServerOptions
from shoal.strategies.server.worker_engine import WorkerEngine

BAND = 0.56
"""How far predicted times were off: more servers than one, and on hosts, are not calibrated."""


class Server(ServerOptions, Strategy):
    """Sharded parameter servers beside the workers, started and stopped with them."""

    needs_helper_processes: ClassVar[bool] = True

    def apply(self, model: LocalModel, mesh: Mesh) -> LocalModel:
        """Replace `forward`, `run`, `gather_params` and `strategy_state`.

        Collective. The servers start later, when the optimizer is known (`WorkerEngine.attach`).

        Raises:
            StrategyRefused: another system than Linux; the model has no trainable parameter; a mesh
                with other axes than data; compress of complex parameters; complex128; ranks on
                several machines without the package for encryption.
            ConfigError: compress of an unknown kind.
        """
        if sys.platform != "linux":
            raise StrategyRefused(
                f"strategy server starts its servers on Linux alone, and this is {sys.platform}. "
                "Use ddp or zero1."
            )
        if not model.trainable_params:
            raise StrategyRefused(
                "strategy server steps parameters on servers; the model has no trainable parameter."
            )
        if mesh.data.size < mesh.size:
            raise StrategyRefused(WHOLE_PARAMETERS)
        if self.encrypt and spans_machines(mesh.place) and not can_encrypt():
            raise StrategyRefused(f"strategy server: {MISSING_PACKAGE}.")
        if self.compress != "none":
            check_real_parameters(model.trainable_params, self.compress)
        double = [
            name
            for name, parameter in model.trainable_params.items()
            if parameter.dtype == torch.complex128
        ]
        if double:
            raise StrategyRefused(
                f"strategy server sends complex numbers as complex64, and {', '.join(double)} is "
                "complex128. Use complex64, or ddp."
            )
        mesh.broadcast_module(model.module)
        engine = WorkerEngine(self, model, mesh, start_servers)
        register_cleanup(engine)
        return replace(
            model,
            forward=engine.forward,
            run=engine.run,
            gather_params=engine.gather,
            strategy_state=engine,
        )

    def cost(self, step: StepCost) -> StepCost:
        """Return the step of a worker.

        A worker holds parameters and gradients, and no optimizer's state. A server receives the
        gradients of all workers, so each partition costs it workers x bytes. It holds values,
        their optimizer's state, a sum, and a gradient of each worker on another host.

        Raises: StrategyRefused: replicas, and stale or compressed pushes, whose time is not
            modelled; micro-batches of a loop that computes the loss.
        """
        if step.is_loop_loss and step.accumulate > 1:
            raise StrategyRefused(LOOP_IN_SERVERS)
        if self.staleness != "0" or self.compress != "none" or self.replicas > 1:
            raise StrategyRefused(
                "replicas, staleness and compress of servers: their cost in time is not modelled."
            )
        segments = list(step.segments)
        parts = step.once((self.servers, self.part_mb), lambda: self._parts_by_segment(step))
        for index, (pulls, pushes) in parts.items():
            segments[index] = segments[index]._replace(prefetched=pulls, beside=pushes)
        step = replace(step, segments=tuple(segments), servers=self.servers, optimizer_share=0.0)
        elsewhere = step.layout.world * (1 - 1 / step.layout.hosts)
        pushed = [p for s in segments for p in s.parameters if p.gradient_bytes]
        held = sum(
            p.parameter_bytes + p.optimizer_bytes + p.gradient_bytes * (1 + elsewhere)
            for p in pushed
        )
        around = *step.around_pass, ("server parameter", len(pushed))
        step = replace(step, around_pass=around, band=max(step.band, BAND), server_bytes=held)
        return step.map_parameters(lambda parameter: parameter._replace(optimizer_bytes=0.0))

    def _parts_by_segment(self, step: StepCost) -> dict[int, list[tuple[SentMessage, ...]]]:
        """Return pulls and pushes of the partitions, by the first segment that uses each."""
        order = [
            (i, p) for i, s in enumerate(step.segments) for p in s.parameters if p.gradient_bytes
        ]
        segment_of = {p.name: index for index, p in order}
        metas = {p.name: ParamMeta(int(p.numel), torch.float32, 0) for _, p in order}
        limit = partition_bytes(metas, self.servers, int(self.part_mb * MIB))
        sizes: dict[int, list[int]] = defaultdict(list)
        for part in partition(metas, limit):
            sizes[min(segment_of[each.name] for each in part.segments)].append(part.size_bytes)
        return {
            index: [
                tuple(SentMessage(kind, size, "servers") for size in found)
                for kind in ("pull", "push")
            ]
            for index, found in sizes.items()
        }

    @property
    def deviations(self) -> list[str]:
        """Sentences for the startup summary: how numbers differ from those of one device."""
        sentences = []
        if self.staleness != "0":
            behind = "any number" if self.staleness == "async" else f"up to {self.staleness}"
            sentences.append(
                f"staleness={self.staleness}: gradients are of weights that lack {behind} of "
                "others' steps."
            )
        if self.compress != "none":
            sentences.append(f"compress={self.compress}: gradients arrive rounded, or late.")
        return sentences


def start_servers(engine: WorkerEngine, recipe: OptimizerSpec) -> WorkerClient:
    """Start servers for an engine's partitions, and connect to them. Collective."""
    options = engine.options
    flat = engine.flat
    staleness = engine.staleness
    owners = tuple(assign(flat.parts, options.servers))
    settings = ShardSettings(
        tuple(flat.parts),
        recipe,
        engine.mesh.size,
        staleness,
        options.lease_s,
        options.compress,
    )
    transport, folder = engine.launcher.share_key(options.encrypt)
    job = ClusterConfig(transport, folder, settings, owners, options.servers, options.replicas)
    coordinator = engine.launcher.start(job)
    # Ranks whose pushes a step waits for, in the trace.
    ranks = range(engine.mesh.size) if engine.is_synchronous else ()
    awaited = tuple(rank for rank in ranks if rank != engine.mesh.rank)
    shares = options.shared_memory and engine.compression is None
    network = SocketNetwork(engine.mesh.rank, coordinator, transport, flat, staleness, shares)
    client = WorkerClient(flat, network, staleness, engine.mesh.recorder, awaited)
    engine.end = finalize(engine, _close_unused, client, engine.launcher)
    engine.end.atexit = False
    return client


def _close_unused(client: WorkerClient, launcher: ClusterLauncher) -> None:
    """Close what an engine has left that the garbage collector has found, as `close` does.

    Ranks are collected at different times, and each waits for the others before it ends servers.
    This may be any thread, one of the client included, so another one waits.
    """

    def leave() -> None:
        client.close()
        launcher.close(None)

    for holder in (client, launcher):
        register_cleanup(holder)  # the process may end before
    threading.Thread(target=leave, name="leave servers", daemon=True).start()
