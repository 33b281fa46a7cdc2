"""Operations as they are counted: their tensors, and lines through the counts of two steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from shoal.costs.work import Affine, OpWork
from shoal.platform.torch_private.pytree import tree_leaves


class CountedOp(NamedTuple):
    kind: str
    flops: float
    moved_bytes: float
    itemsize: int = 4


def tensors_of(nest: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor)]


def num_bytes(nest: Any) -> float:
    return float(sum(tensor.nbytes for tensor in tensors_of(nest)))


def storage_key(tensor: Tensor) -> int:
    """Return a number that tells the memory of a tensor from that of others."""
    return id(tensor.untyped_storage())


def affine(first: float, second: float, samples: tuple[int, int]) -> Affine:
    """Return the line through the values of two numbers of samples."""
    low, high = samples
    slope = (second - first) / (high - low)
    return Affine(first - slope * low, slope)


def affine_ops(
    first: Sequence[CountedOp], second: Sequence[CountedOp], samples: tuple[int, int]
) -> tuple[OpWork, ...]:
    """Return the operations of a segment, equal ones together."""
    if [op.kind for op in first] != [op.kind for op in second]:
        more = samples[1] / samples[0]
        second = [
            op._replace(flops=more * op.flops, moved_bytes=more * op.moved_bytes) for op in first
        ]
    counts = Counter(
        (
            a.kind,
            affine(a.flops, b.flops, samples),
            affine(a.moved_bytes, b.moved_bytes, samples),
            a.itemsize,
        )
        for a, b in zip(first, second, strict=True)
    )
    return tuple(
        OpWork(kind, flops, moved, count, itemsize)
        for (kind, flops, moved, itemsize), count in counts.items()
    )
