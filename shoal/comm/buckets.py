"""Tensors that are sent at once: a message for each small one would wait longer than it travels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import TypeVar

from torch import Tensor

from shoal.comm.norm import to_local
from shoal.platform.tensors import flatten_tensors, unflatten_tensors

T = TypeVar("T", bound=Tensor)


def bucketize(tensors: Iterable[T], size_bytes: int) -> list[list[T]]:
    """The tensors in their order, in lists of one type, none larger than `size_bytes` unless it is
    one tensor alone.

    Counted is what this rank holds of each.
    """
    found: list[list[T]] = []
    for _, group in groupby(tensors, key=lambda tensor: tensor.dtype):
        filled = size_bytes + 1
        for tensor in group:
            more = to_local(tensor).numel() * tensor.element_size()
            if filled + more > size_bytes:
                found.append([])
                filled = 0
            found[-1].append(tensor)
            filled += more
    return found


def apply_flattened(
    function: Callable[[Tensor], Tensor],
    tensors: Sequence[Tensor],
) -> list[Tensor]:
    """Call `function` once for all `tensors`, flattened one after the other.

    Args:
        function: returns as many elements as it is given; its dtype is the result's.
        tensors: at least one, of one dtype.

    Returns: views of what `function` returned, in the shapes of `tensors`.
    """
    return unflatten_tensors(function(flatten_tensors(tensors)), tensors)
