"""Cost of parameter servers: gradients pushed beside the backward pass, values pulled before use.

A worker holds parameters and gradients, and no optimizer's state. A server receives the gradients
of all workers, so each partition costs it workers x bytes.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from shoal.costs.step_cost import SentMessage, StepCost
from shoal.errors import StrategyRefused
from shoal.parameter_server.partitioning import ParamMeta, partition, partition_bytes
from shoal.platform.tensors import MIB
from shoal.strategies.server_options import ServerOptions

BAND = 0.55
"""How far times were off: what servers and workers take from each other is not calibrated."""


def cost(options: ServerOptions, step: StepCost) -> StepCost:
    """Return the step of a worker.

    Raises: StrategyRefused: beside tensor or pipeline; stale or compressed pushes, whose time is
        not modelled.
    """
    if step.layout.data < step.layout.world:
        raise StrategyRefused(
            "strategy server owns whole parameters; beside tensor and pipeline no rank has them."
        )
    if options.staleness != "0" or options.compress != "none" or options.replicas > 1:
        raise StrategyRefused(
            "replicas, staleness and compress of servers: their cost in time is not modelled."
        )
    order = [(i, p) for i, s in enumerate(step.segments) for p in s.parameters if p.gradient_bytes]
    segment_of = {p.name: index for index, p in order}
    metas = {p.name: ParamMeta(int(p.numel), torch.float32, 0) for _, p in order}
    limit = partition_bytes(metas, options.servers, int(options.part_mb * MIB))
    segments = list(step.segments)
    for part in partition(metas, limit):
        used = sorted(segment_of[each.name] for each in part.segments)
        pull = SentMessage("pull", part.size_bytes, "servers")
        push = SentMessage("push", part.size_bytes, "servers")
        first = segments[used[0]]
        segments[used[0]] = replace(
            first, prefetched=(*first.prefetched, pull), beside=(*first.beside, push)
        )
    step = replace(step, segments=tuple(segments), servers=options.servers, optimizer_share=0.0)
    step = replace(step, band=max(step.band, BAND))
    return step.map_parameters(lambda parameter: parameter._replace(optimizer_bytes=0.0))
