"""Partitions: a model's parameters in pieces of a few MiB, and the server that owns each piece.

   parameters   | embedding        | w1 | b1 | w2 | b2 | norm |   in the order of the forward pass
   partitions   |  0  |  1  |  2   |         3         |  4   |   a small parameter lies in one
   servers         a     b     a             b            a       the least loaded, by bytes

A partition is the unit of everything: it is pushed, summed, stepped, replicated, migrated and
pulled by itself. Its parameters belong to one optimizer group and have one dtype, so that one call
of the optimizer steps it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.platform.tensors import MIB
from shoal.shm_backend.segment import ALIGNMENT_BYTES

PARTITIONS_PER_LINK = 4
"""At least, between hosts, so that a server receives, steps and sends at the same time."""
SMALL_PART_BYTES = 64 * 1024


class ParamSlice(NamedTuple):
    """Consecutive values of one parameter, inside a partition.

    Attributes:
        start: of the slice in the flattened parameter.
        length: number of values.
        offset: of the slice in the partition.
    """

    name: str
    start: int
    length: int
    offset: int


class Partition(NamedTuple):
    """Consecutive values of one or several parameters, pushed and pulled together.

    Attributes:
        number: index of the partition in the model.
        group: index of the optimizer group.
        segments: the slices, in order.
    """

    number: int
    group: int
    dtype: torch.dtype
    segments: tuple[ParamSlice, ...]

    @property
    def length(self) -> int:
        """Number of values."""
        return self.segments[-1].offset + self.segments[-1].length

    @property
    def size_bytes(self) -> int:
        return self.length * self.dtype.itemsize


class ParamMeta(NamedTuple):
    """Properties of a parameter that decide on its partition.

    Attributes:
        length: number of values.
        group: index of the optimizer group.
    """

    length: int
    dtype: torch.dtype
    group: int


def param_metas(parameters: Mapping[str, Tensor], optimizer: Optimizer) -> dict[str, ParamMeta]:
    """Describe parameters, each with the index of its group in the optimizer."""
    groups: dict[int, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        groups.update(dict.fromkeys(map(id, group["params"]), index))
    return {
        name: ParamMeta(parameter.numel(), parameter.dtype, groups[id(parameter)])
        for name, parameter in parameters.items()
    }


def partition_bytes(
    shapes: Mapping[str, ParamMeta],
    servers: int,
    most_bytes: int = 4 * MIB,
    *,
    one_machine: bool = True,
) -> int:
    """Return the size bound of partitions, smaller for a small model, so that each server has some.

    On one host, a partition's messages cost more time than its bytes. So a server has one partition
    if one is enough, even if its load becomes a little uneven: small parameters are not split.
    Between hosts the bytes cost more: one partition is pushed during the backward pass, stepped
    while the next one arrives, and pulled while others are still pushed.

    Args:
        most_bytes: upper bound of the result.
    """
    share_bytes = sum(shape.length * shape.dtype.itemsize for shape in shapes.values()) / servers
    most_bytes = max(1, most_bytes)
    min_count = 1 if one_machine else PARTITIONS_PER_LINK
    count = max(min_count, math.ceil(share_bytes / most_bytes))
    rounded_up = math.ceil(share_bytes / count / ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return min(max(SMALL_PART_BYTES, rounded_up), most_bytes)


def partition(shapes: Mapping[str, ParamMeta], part_bytes: int = 4 * MIB) -> list[Partition]:
    """Divide parameters into partitions, numbered in the order of their first parameters.

    A parameter that is too large is split into equal slices, which share no partition with others.

    Args:
        shapes: name -> properties, in the order of the forward pass.
        part_bytes: bound on the size of a partition.
    """
    slices: list[list[ParamSlice]] = []
    kinds: list[tuple[int, torch.dtype]] = []
    unfilled: dict[tuple[int, torch.dtype], int] = {}  # kind -> partition with space for more
    for name, (length, dtype, group) in shapes.items():
        kind = (group, dtype)
        max_length = max(1, part_bytes // dtype.itemsize)
        last = unfilled.get(kind)
        filled = 0 if last is None else slices[last][-1].offset + slices[last][-1].length
        if last is not None and filled + length <= max_length:
            slices[last].append(ParamSlice(name, 0, length, filled))
            continue
        new_slices = _split(name, length, max_length)
        unfilled[kind] = len(slices)
        slices += [[new] for new in new_slices]
        kinds += [kind] * len(new_slices)
        if len(new_slices) > 1:
            del unfilled[kind]
    return [
        Partition(number, group, dtype, tuple(segments))
        for number, (segments, (group, dtype)) in enumerate(zip(slices, kinds, strict=True))
    ]


def _split(name: str, length: int, max_length: int) -> list[ParamSlice]:
    """Split a parameter into slices of lengths that differ by one at most."""
    count = max(1, math.ceil(length / max_length))
    bounds = [length * index // count for index in range(count + 1)]
    return [ParamSlice(name, start, end - start, 0) for start, end in itertools.pairwise(bounds)]


def assign(parts: Iterable[Partition], servers: int) -> list[int]:
    """Choose the owner of each partition: the server that has least."""
    loads = dict.fromkeys(range(servers), 0)
    owners = []
    for part in parts:
        owners.append(_least_loaded(loads))
        loads[owners[-1]] += part.size_bytes
    return owners


def rebalance(
    sizes: Sequence[int], owners: Sequence[int], servers: Collection[int]
) -> dict[int, int]:
    """Choose migrations after which all servers have about the same load.

    Each round moves one partition away from the server that has most, as long as that makes the
    larger of the two loads smaller. So few bytes are moved.

    Args:
        sizes: bytes of each partition.
        owners: the present server of each partition. One that is not in `servers` loses all.

    Returns:
        partition -> new server.
    """
    moves: dict[int, int] = {}
    loads = dict.fromkeys(servers, 0)
    for index, owner in enumerate(owners):
        if owner in loads:
            loads[owner] += sizes[index]
    unowned = [index for index, owner in enumerate(owners) if owner not in loads]
    for index in sorted(unowned, key=lambda index: (-sizes[index], index)):
        moves[index] = _least_loaded(loads)
        loads[moves[index]] += sizes[index]
    while True:
        fullest = max(loads, key=lambda server: (loads[server], -server))
        target = _least_loaded(loads)

        def larger_load(index: int, source: int = fullest, target: int = target) -> int:
            return max(loads[source] - sizes[index], loads[target] + sizes[index])

        owned = [index for index, owner in enumerate(owners) if moves.get(index, owner) == fullest]
        best = min(owned, key=larger_load, default=None)
        if best is None or larger_load(best) >= loads[fullest]:
            # A partition may have moved away and back.
            return {index: server for index, server in moves.items() if server != owners[index]}
        loads[fullest] -= sizes[best]
        loads[target] += sizes[best]
        moves[best] = target


def _least_loaded(loads: Mapping[int, int]) -> int:
    return min(loads, key=lambda server: (loads[server], server))


def offsets(parts: Sequence[Partition]) -> tuple[dict[int, int], int]:
    """Lay out partitions in memory.

    Those of one group and dtype lie end to end. So a parameter that spans several partitions is
    contiguous, too.

    Returns:
        number -> offset in bytes, and the length of all together.
    """
    sizes: dict[tuple[int, torch.dtype], int] = {}
    for part in parts:
        kind = part.group, part.dtype
        sizes[kind] = sizes.get(kind, 0) + part.size_bytes
    next_offsets = {}
    end = 0
    for kind, size_bytes in sizes.items():
        next_offsets[kind] = end
        end += -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    starts = {}
    for part in parts:
        starts[part.number] = next_offsets[part.group, part.dtype]
        next_offsets[part.group, part.dtype] += part.size_bytes
    return starts, end
