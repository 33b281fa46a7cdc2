"""Micro-batches: consecutive samples of a batch, split along dimension 0.

samples   │ 0 1 2 │ 3 4 5 │ 6 7 │       8 samples in 3 micro-batches
stop                          ▲         a stop request travels with the last one
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from shoal.data.tree_map import take_rows
from shoal.errors import UsageError
from shoal.strategies.base import LocalBatch


def split_microbatches(batch: LocalBatch, count: int, min_count: int = 1) -> Iterator[LocalBatch]:
    """Split a batch along dimension 0 of every tensor, into micro-batches of nearly equal size.

    Args:
        count: micro-batches. A batch of fewer samples gives one for each sample.
        min_count: micro-batches that there must be all the same. Stand-ins of weight 0 fill up.
    """
    count = min(count, max(batch.num_samples, min_count))
    base, extra = divmod(batch.num_samples, count)
    start = 0
    for index in range(count):
        num_samples = base + (index < extra)
        # A stand-in computes the first sample: a forward pass needs one.
        window = slice(start, start + num_samples) if num_samples else slice(0, 1)
        is_last = index == count - 1
        args, kwargs = samples_of(batch, window)
        yield batch._replace(
            args=args,
            kwargs=kwargs,
            num_samples=num_samples,
            first_row=batch.first_row + start,
            microbatch=batch.microbatch * count + index,
            is_last_microbatch=is_last,
            stop_requested=batch.stop_requested and is_last,
        )
        start += num_samples


def samples_of(batch: LocalBatch, window: slice) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the keyword arguments with the samples `window` alone.

    Raises: UsageError: dimension 0 of a tensor is not the number of samples.
    """

    def mismatch(tensor: Tensor) -> UsageError:
        return UsageError(
            "accumulate and pipeline split batches along dimension 0; this rank has "
            f"{batch.num_samples} samples and a tensor of shape {tuple(tensor.shape)}. Put the "
            "batch dimension first, or use accumulate=1 and microbatches=1."
        )

    def taken(value: Any) -> Any:
        return take_rows(value, window, batch.num_samples, mismatch)

    if 0 < batch.num_samples <= window.stop - window.start:
        return batch.args, dict(batch.kwargs)  # all, whatever their shapes
    # `args` itself is no list of samples, though it may be as long as one.
    return tuple(map(taken, batch.args)), taken(dict(batch.kwargs))
