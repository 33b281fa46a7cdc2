"""A batch in micro-batches, along dimension 0."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from shoal.data.tree_map import tree_map
from shoal.errors import UsageError
from shoal.strategies.base import LocalBatch


def split_microbatches(batch: LocalBatch, parts: int, least: int = 1) -> Iterator[LocalBatch]:
    """Micro-batches of nearly equal size along dimension 0 of every tensor; the stop request goes
    with the last.

    There are `parts` of them, or as many as samples, but `least` all the same: stand-ins fill up.
    """
    parts = min(parts, max(batch.num_samples, least))
    base, extra = divmod(batch.num_samples, parts)
    start = 0
    for index in range(parts):
        rows = base + (index < extra)
        window = slice(start, start + rows) if rows else slice(0, 1)
        last = index == parts - 1
        yield batch._replace(
            inputs=chunk(batch.inputs, window, batch.num_samples),
            target=chunk(batch.target, window, batch.num_samples),
            num_samples=rows,
            is_last_microbatch=last,
            stop_requested=batch.stop_requested and last,
        )
        start += rows


def chunk(value: Any, window: slice, rows: int) -> Any:
    """The same rows of every tensor in a nest of tuples, lists and dicts; 0-dimensional tensors
    stay whole.
    """
    if isinstance(value, Tensor):
        if value.dim() and value.shape[0] != max(rows, 1):
            raise UsageError(
                f"accumulate and pipeline split batches along dimension 0; this rank has {rows} "
                "samples and a tensor "
                f"of shape {tuple(value.shape)}. Put the batch dimension first, or use "
                "accumulate=1 and microbatches=1."
            )
        return value[window] if value.dim() else value
    return tree_map(value, lambda item: chunk(item, window, rows))
