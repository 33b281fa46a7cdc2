"""Buckets of tensors that are sent in one message.

A message for each small tensor would cost more in latency than in transfer."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import TypeVar

from torch import Tensor

from shoal.comm.norm import to_local

T = TypeVar("T", bound=Tensor)


def bucketize(tensors: Iterable[T], size_bytes: int) -> list[list[T]]:
    """Split tensors into buckets of at most `size_bytes`, in their order.

    A bucket has one dtype. A tensor larger than `size_bytes` is a bucket alone. Of a DTensor, the
    local shard counts.
    """
    buckets: list[list[T]] = []
    for _, group in groupby(tensors, key=lambda tensor: tensor.dtype):
        filled_bytes = size_bytes + 1  # start a bucket with the first tensor of each dtype
        for tensor in group:
            tensor_bytes = to_local(tensor).numel() * tensor.element_size()
            if filled_bytes + tensor_bytes > size_bytes:
                buckets.append([])
                filled_bytes = 0
            buckets[-1].append(tensor)
            filled_bytes += tensor_bytes
    return buckets
