"""A trial of an optimizer on shards: does it step them as it steps whole tensors?

    whole     step(tensors)                       on every rank, with the same random gradients
    shards    step(the same tensors, sharded as the parameters are)         all ranks together

A sharded tensor knows what it is: its norm is that of the whole, and so is a sum over a flattened
gradient. So an optimizer that looks at whole tensors may be exact on shards, and one that reaches
for the local part is not.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.optim import Optimizer

from shoal.comm.norm import full_tensor
from shoal.data.seeds import GeneratorStates
from shoal.trial.elementwise import (
    STEPS,
    TOLERANCE_OF_STEPS,
    OptimizerAnswer,
    copy_of,
    step_once,
)

MOST_LAYOUTS = 8
"""Kinds of shards that are tried."""
LONGEST_SIDE = 6
"""The longest side of a small tensor, along dimensions that are not divided."""


class ShardLayout(NamedTuple):
    """The small tensor that stands for all parameters of one kind.

    Attributes: mesh: None for parameters that every rank holds whole, as plain tensors.
    """

    shape: tuple[int, ...]
    mesh: DeviceMesh | None
    placements: tuple[Placement, ...] = ()


def optimizer_steps_shards(optimizer: Optimizer, parameters: Sequence[Tensor]) -> OptimizerAnswer:
    """Return whether an optimizer steps shards as it steps whole tensors, and how it fails.

    Copies of it without state step small tensors; the optimizer stays as it is. Collective over the
    meshes of the parameters, whose ranks must all call it with the same optimizer.

    Args: parameters: as this rank owns them. DTensors without strided shards are tried, with plain
        tensors among them where the optimizer has some.
    """
    layouts = _layouts(parameters)
    if all(layout.mesh is None for layout in layouts):
        return OptimizerAnswer(None, "")
    generators = GeneratorStates({p.device for p in parameters})
    try:
        with redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            whole = _stepped(optimizer, layouts, in_shards=False)
            generators.restore()
            found = _stepped(optimizer, layouts, in_shards=True)
    except Exception as error:  # noqa: BLE001 - of the optimizer, on all ranks alike
        text = f"{type(error).__name__}: {error}".split("\n")[0][:200].rstrip(".: ")
        return OptimizerAnswer(False, f"with sharded ones it fails ({text})")
    finally:
        generators.restore()
    start = [value for _ in optimizer.param_groups for value in _numbers(layouts, 0)]
    is_exact = _distance(whole, found) <= TOLERANCE_OF_STEPS * _distance(whole, start)
    return OptimizerAnswer(is_exact, "")


def _layouts(parameters: Sequence[Tensor]) -> list[ShardLayout]:
    """Return the kinds of shards, each once, in the order of the parameters."""
    layouts: dict[ShardLayout, None] = {}
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            # A subclass is a strided shard, which torch makes of plain ones only.
            if any(type(axis) not in (Shard, Replicate) for axis in parameter.placements):
                return []
            shape = _small_shape(parameter)
            layouts[ShardLayout(shape, parameter.device_mesh, parameter.placements)] = None
    sharded = [*layouts][:MOST_LAYOUTS]
    # One that joins all gradients meets both kinds in one tensor.
    plain = next((p for p in parameters if not isinstance(p, DTensor)), None)
    if plain is None:
        return sharded
    return [*sharded, ShardLayout(tuple(min(n, LONGEST_SIDE) for n in plain.shape), None)]


def _small_shape(parameter: DTensor) -> tuple[int, ...]:
    """Return a small shape that is divided as evenly, or as unevenly, as the parameter."""
    sizes = [1] * parameter.ndim
    for index, axis in enumerate(parameter.placements):
        if isinstance(axis, Shard):
            sizes[axis.dim] *= parameter.device_mesh.size(index)
    return tuple(
        min(length, LONGEST_SIDE if parts == 1 else 2 * parts + length % parts)
        for length, parts in zip(parameter.shape, sizes, strict=True)
    )


def _numbers(layouts: Sequence[ShardLayout], seed: int) -> list[Tensor]:
    """Return random tensors, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(layout.shape, generator=generator, dtype=torch.float64) + 0.5
        for layout in layouts
    ]


def _stepped(optimizer: Optimizer, layouts: Sequence[ShardLayout], in_shards: bool) -> list[Tensor]:
    """Return whole values after some steps, once for each group. Collective if `in_shards`."""

    device = next(layout.mesh.device_type for layout in layouts if layout.mesh is not None)

    def laid_out(tensor: Tensor, layout: ShardLayout) -> Tensor:
        on_device = tensor.to(device)
        if not in_shards or layout.mesh is None:
            return on_device
        # No rank sends: all have made the same numbers.
        return distribute_tensor(on_device, layout.mesh, layout.placements, src_data_rank=None)

    def tensors(seed: int) -> list[Tensor]:
        return [laid_out(*pair) for pair in zip(_numbers(layouts, seed), layouts, strict=True)]

    groups = [[nn.Parameter(value) for value in tensors(0)] for _ in optimizer.param_groups]
    twin = copy_of(optimizer, groups)
    parameters = [parameter for group in groups for parameter in group]
    for step in range(STEPS):
        step_once(twin, parameters, tensors(1 + step) * len(groups))
    return [full_tensor(parameter).cpu() for parameter in parameters]


def _distance(ones: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    pairs = zip(ones, others, strict=True)
    return math.sqrt(sum(float((a - b).square().sum()) for a, b in pairs))
