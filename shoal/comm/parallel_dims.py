"""Where each rank stands in a world that is cut in up to three ways.

      pipeline=2, tensor=2 on 8 ranks       the data-parallel size is what is left: 2

                  data 0        data 1
      stage 0   [ 0   1 ]     [ 2   3 ]     tensor     0 1 | 2 3 | 4 5 | 6 7      neighbours, inside one machine
      stage 1   [ 4   5 ]     [ 6   7 ]     data       0 2 | 1 3 | 4 6 | 5 7
                                            pipeline   0 4 | 1 5 | 2 6 | 3 7      the farthest apart; sends the least

An axis is a size and a stride: ranks that differ in nothing else are `stride` apart. This file
needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ParallelDims:
    """How far each strategy spans.

    Args:
        pipeline, tensor: ranks along the axis, 1 where there is no such strategy.
        shard: ranks that share one set of shards, where that is not the whole data axis; else 0.
    """

    pipeline: int = 1
    tensor: int = 1
    shard: int = 0

    def data(self, world: int) -> int:
        """What is left of the world."""
        return world // (self.pipeline * self.tensor)


def groups_along(world: int, size: int, stride: int) -> tuple[tuple[int, ...], ...]:
    """All groups of ranks along an axis; together they are the world."""
    block = size * stride
    return tuple(
        tuple(range(first, first + block, stride))
        for start in range(0, world, block)
        for first in range(start, start + stride)
    )


def problems(degrees: ParallelDims, world: int, local_world: int | None = None) -> list[str]:
    """Why a world cannot be cut so, a sentence each; none where it can.

    Args: local_world: ranks on this machine, where that is known by now.
    """
    wrong = [f"{name}={size}: must be 1 or more." for name, size in _named(degrees) if size < 1]
    if wrong:
        return wrong
    product = degrees.pipeline * degrees.tensor
    if world % product:
        cut = " x ".join(f"{name}={size}" for name, size in _named(degrees) if size > 1)
        return [
            f"{cut} needs a multiple of {product} ranks; there are {world}. {_hint(degrees, world)}"
        ]
    found = []
    if local_world is not None and local_world % degrees.tensor:
        found.append(
            f"tensor={degrees.tensor}: tensor groups lie inside one machine, and this one has "
            "LOCAL_WORLD_SIZE="
            f"{local_world} ranks. Start a multiple of {degrees.tensor} on each."
        )
    data = degrees.data(world)
    if degrees.shard < 0 or (degrees.shard and data % degrees.shard):
        found.append(
            f"hybrid={degrees.shard} shards inside groups of {degrees.shard} ranks; {data} "
            "ranks do not make whole "
            f"groups. Use a divisor of {data}."
        )
    return found


def _hint(degrees: ParallelDims, world: int) -> str:
    """Other values of one of the degrees that would do, those of the pipeline first."""
    pipeline, tensor = degrees.pipeline, degrees.tensor
    for name, size, other in (("pipeline", pipeline, tensor), ("tensor", tensor, pipeline)):
        if size == 1 or world % other:
            continue
        fitting = [f"{name}={n}" for n in range(2, world // other + 1) if (world // other) % n == 0]
        if fitting:
            return (
                f"Try {', '.join(fitting[:-1])}{' or ' if len(fitting) > 1 else ''}{fitting[-1]}."
            )
    product = pipeline * tensor
    return f"Start {-(-world // product) * product} ranks."


def _named(degrees: ParallelDims) -> list[tuple[str, int]]:
    return [("tensor", degrees.tensor), ("pipeline", degrees.pipeline)]
