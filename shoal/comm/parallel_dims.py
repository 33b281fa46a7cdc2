"""The sizes of the three axes of the mesh, and the groups of ranks along each axis.

      pipeline=2, tensor=2 on 8 ranks: the data axis has the remaining size, 2

                  data 0        data 1      groups along each axis
      stage 0   [ 0   1 ]     [ 2   3 ]     tensor     0 1 | 2 3 | 4 5 | 6 7    inside one machine
      stage 1   [ 4   5 ]     [ 6   7 ]     data       0 2 | 1 3 | 4 6 | 5 7
                                            pipeline   0 4 | 1 5 | 2 6 | 3 7    over machines

Tensor parallel ranks send the most, so they are neighbours. Pipeline stages send the least, so they
are the farthest apart. An axis has a size and a stride: the ranks of a group are `stride` apart.

The command line checks sizes with this file, so it must not import torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ParallelDims:
    """The sizes of the axes.

    Args:
        pipeline, tensor: ranks along the axis; 1 without such a strategy.
        dp_shard: ranks over which ZeRO shards, if that is not the full data axis; else 0.
    """

    pipeline: int = 1
    tensor: int = 1
    dp_shard: int = 0

    def data(self, world: int) -> int:
        """Return the size of the data axis: the remaining factor of the world."""
        return world // (self.pipeline * self.tensor)


def groups_along(world: int, size: int, stride: int) -> tuple[tuple[int, ...], ...]:
    """Return all groups of ranks along an axis; together they are the world."""
    block = size * stride
    return tuple(
        tuple(range(first, first + block, stride))
        for start in range(0, world, block)
        for first in range(start, start + stride)
    )


def problems(degrees: ParallelDims, world: int, local_world: int | None = None) -> list[str]:
    """Return a sentence for each reason why a world cannot have these sizes.

    Args: local_world: ranks on this machine, if it is known.
    """
    sentences = [
        f"{name}={size}: must be 1 or more." for name, size in _named_sizes(degrees) if size < 1
    ]
    if sentences:
        return sentences
    product = degrees.pipeline * degrees.tensor
    if world % product:
        sizes = " x ".join(f"{name}={size}" for name, size in _named_sizes(degrees) if size > 1)
        fewer = world // product * product
        start = f"{f'{fewer} or ' if fewer else ''}{fewer + product}"
        fact = f"{sizes} needs a multiple of {product} ranks; there are {world}"
        return [f"{fact}. Start {start} ranks, or choose sizes that divide {world}."]
    if local_world is not None and local_world % degrees.tensor:
        sentences.append(
            f"tensor={degrees.tensor}: tensor groups lie inside one machine, and one has "
            f"LOCAL_WORLD_SIZE={local_world} ranks. Start a multiple of {degrees.tensor} on each."
        )
    data = degrees.data(world)
    if degrees.dp_shard < 0 or (degrees.dp_shard and data % degrees.dp_shard):
        sentences.append(
            f"hybrid={degrees.dp_shard} shards inside groups of {degrees.dp_shard} ranks; {data} "
            f"ranks do not make whole groups. Use a divisor of {data}."
        )
    return sentences


def _named_sizes(degrees: ParallelDims) -> list[tuple[str, int]]:
    return [("tensor", degrees.tensor), ("pipeline", degrees.pipeline)]
