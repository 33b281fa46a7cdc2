"""What is cut how: a model's parameters as parts of a few MiB, and which server owns which part.

      parameters   | embedding        | w1 | b1 | w2 | b2 | norm |      in the order of the forward pass
      parts        |  0  |  1  |  2   |         3         |  4   |      a small parameter never straddles two parts
      servers         a     b     a             b            a          by bytes, the first where there is least

A part is the unit of everything: it is pushed, summed, stepped, replicated, moved and pulled by
itself. Its parameters belong to one optimizer group and have one dtype, so that one call of the
optimizer steps it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from shoal.platform.tensors import MIB
from shoal.shm_backend.segment import ALIGNMENT_BYTES

PARTITIONS_PER_LINK = 4  # at least, so that a server sends, steps and receives at the same time
SMALL_PART_BYTES = 64 * 1024


class ParamSlice(NamedTuple):
    """A run of numbers of one parameter inside a part."""

    name: str
    start: int  # within the flattened parameter
    length: int
    offset: int  # within the part


class Partition(NamedTuple):
    """A run of numbers that is pushed and pulled as one."""

    number: int
    group: int
    dtype: torch.dtype
    segments: tuple[ParamSlice, ...]

    @property
    def length(self) -> int:
        """How many numbers."""
        return self.segments[-1].offset + self.segments[-1].length

    @property
    def size_bytes(self) -> int:
        return self.length * self.dtype.itemsize


class ParamMeta(NamedTuple):
    """What is to be known of a parameter."""

    length: int  # numbers in it
    dtype: torch.dtype
    group: int  # of the optimizer


def partition_bytes(
    shapes: Mapping[str, ParamMeta],
    servers: int,
    most_bytes: int = 4 * MIB,
    *,
    one_machine: bool = True,
) -> int:
    """The most that is cut as one; less of a small model, so that every server has some.

    On one machine a part's messages take longer than its bytes, so a server has one part where one
    will do, even if it
    has a few more bytes than another: small parameters are not cut. Between
    machines its bytes do: one is pushed while the backward pass goes on, stepped while the next one
    arrives, and pulled while others are still pushed."""
    share = sum(shape.length * shape.dtype.itemsize for shape in shapes.values()) / servers
    most_bytes = max(1, most_bytes)
    pieces = max(1 if one_machine else PARTITIONS_PER_LINK, math.ceil(share / most_bytes))
    rounded_up = math.ceil(share / pieces / ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return min(max(SMALL_PART_BYTES, rounded_up), most_bytes)


def partition(shapes: Mapping[str, ParamMeta], part_bytes: int = 4 * MIB) -> list[Partition]:
    """Parts of at most `part_bytes`, numbered in the order of their first parameters.

    A larger parameter is cut into equal pieces, which share no part with others.
    """
    runs: list[list[ParamSlice]] = []
    kinds: list[tuple[int, torch.dtype]] = []
    still_open: dict[tuple[int, torch.dtype], int] = {}
    for name, (length, dtype, group) in shapes.items():
        kind, most = (group, dtype), max(1, part_bytes // dtype.itemsize)
        last = still_open.get(kind)
        filled = 0 if last is None else runs[last][-1].offset + runs[last][-1].length
        if last is not None and filled + length <= most:
            runs[last].append(ParamSlice(name, 0, length, filled))
            continue
        pieces = _pieces(name, length, most)
        still_open[kind] = len(runs)
        runs += [[piece] for piece in pieces]
        kinds += [kind] * len(pieces)
        if len(pieces) > 1:
            del still_open[kind]
    pairs = enumerate(zip(runs, kinds, strict=True))
    return [Partition(number, group, dtype, tuple(run)) for number, (run, (group, dtype)) in pairs]


def _pieces(name: str, length: int, most: int) -> list[ParamSlice]:
    count = max(1, math.ceil(length / most))
    bounds = [length * index // count for index in range(count + 1)]
    return [ParamSlice(name, start, end - start, 0) for start, end in itertools.pairwise(bounds)]


def assign(
    parts: Iterable[Partition], servers: int, bandwidth: Sequence[float] | None = None
) -> list[int]:
    """The owner of each part: in turn the server that would be done first with what it has been
    given.

    Args: bandwidth: of each server, in any one unit; None where all are alike.
    """
    speed = [1.0] * servers if bandwidth is None else list(bandwidth)
    given = [0] * servers
    owners = []
    for part in parts:
        owner = min(
            range(servers),
            key=lambda server: ((given[server] + part.size_bytes) / speed[server], server),
        )
        given[owner] += part.size_bytes
        owners.append(owner)
    return owners


def rebalance(
    sizes: Sequence[int], owners: Sequence[int], servers: Mapping[int, float]
) -> dict[int, int]:
    """Moves, part -> server, after which all servers are done at about the same time; as few bytes
    as that takes.

    Args:
        sizes: bytes of each part.
        owners: of each part, now; one that is not in `servers` is to be left without any.
        servers: the bandwidth of each, in any one unit.
    """
    moves: dict[int, int] = {}
    given = dict.fromkeys(servers, 0)
    for part, owner in enumerate(owners):
        if owner in given:
            given[owner] += sizes[part]
    homeless = [part for part, owner in enumerate(owners) if owner not in given]
    for part in sorted(homeless, key=lambda part: (-sizes[part], part)):
        _move(part, sizes, moves, given, _least_loaded(given, servers, sizes[part]))
    while True:
        fullest = max(servers, key=lambda server: (given[server] / servers[server], -server))
        inside = [part for part, owner in enumerate(owners) if moves.get(part, owner) == fullest]
        better = _best_move(inside, fullest, sizes, given, servers)
        if better is None:
            return {part: server for part, server in moves.items() if server != owners[part]}
        given[fullest] -= sizes[better]
        _move(better, sizes, moves, given, _least_loaded(given, servers, sizes[better]))


def _best_move(
    inside: Collection[int],
    fullest: int,
    sizes: Sequence[int],
    given: Mapping[int, int],
    servers: Mapping[int, float],
) -> int | None:
    """The part of the fullest server whose move leaves the fuller one of the two the least full."""
    found, lowest = None, given[fullest] / servers[fullest]
    for part in inside:
        target = _least_loaded(given, servers, sizes[part])
        there = (given[target] + sizes[part]) / servers[target]
        after = max(there, (given[fullest] - sizes[part]) / servers[fullest])
        if target != fullest and after < lowest:
            found, lowest = part, after
    return found


def _least_loaded(given: Mapping[int, int], servers: Mapping[int, float], size: int) -> int:
    """The server that would be done first with one part more."""
    return min(servers, key=lambda server: ((given[server] + size) / servers[server], server))


def _move(
    part: int, sizes: Sequence[int], moves: dict[int, int], given: dict[int, int], server: int
) -> None:
    moves[part] = server
    given[server] += sizes[part]


def offsets(parts: Iterable[Partition]) -> tuple[dict[int, int], int]:
    """Where in a server's memory each of its parts lies, in bytes, and how long they are
    together.
    """
    at, found = 0, {}
    for part in parts:
        found[part.number] = at
        at += -(-part.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return found, at
