"""A trial of a collate function: are the rows of a share those of the global batch?

    collate(13 samples)                      ┐  equal: each rank collates its own samples
    collate(4), collate(4), collate(5)       ┘  not equal: it pads, draws or packs; see BatchFetcher

The samples are the first of the data, the same on all ranks, so that all ranks find the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from shoal.data.batch_fetcher import BatchFetcher, Collate, rows_of_whole, worker_loader
from shoal.data.index_batches import IndexBatch
from shoal.data.tree_map import is_per_sample, items_of, tensors_in

# Odd, so that the length of a sequence is rarely taken for it.
SAMPLES = 13
PARTS = (slice(0, 4), slice(4, 8), slice(8, SAMPLES))


def needs_whole_batch(fetch: BatchFetcher, batch: IndexBatch, loader: DataLoader) -> bool:
    """Return True if the collate function of `fetch` must see whole global batches.

    It runs in a worker process if the loader has some: a data set may open files when it is first
    read, and must not do so before the workers are forked.
    """
    if isinstance(fetch.collate_fn, Collate):
        return fetch.collate_fn.whole_batch
    if fetch.ready or fetch.collate_fn is default_collate or len(batch.indices) < 2:
        return False
    probe = _CollateProbe(fetch)
    workers = worker_loader(probe, [batch], loader, num_workers=1)
    return bool(probe[batch] if workers is None else next(iter(list(workers))))


class _CollateProbe(Dataset):
    def __init__(self, fetch: BatchFetcher) -> None:
        self.fetch = fetch

    def __getitem__(self, batch: IndexBatch) -> bool:
        indices = batch.indices[:SAMPLES]
        # Fetched twice: a collate function may take its samples apart.
        whole = self.fetch.collated(batch, indices)
        windows = [part for part in PARTS if indices[part]]
        if len(windows) == 1:
            windows = [slice(0, 1), slice(1, None)]
        parts = [self.fetch.collated(batch, indices[window]) for window in windows]
        counts = [len(indices[window]) for window in windows]
        if _same_rows(whole, parts, counts):
            return False
        return rows_of_whole(whole, len(indices)) is not None


def _same_rows(whole: Any, parts: Sequence[Any], counts: Sequence[int]) -> bool:
    """Return True if the parts one after the other are the whole batch."""
    if isinstance(whole, Tensor):
        return not whole.dim() or any(
            _is_concatenation(whole, parts, dim) for dim in range(min(whole.dim(), 2))
        )
    if is_per_sample(whole, sum(counts)):
        joined = [entry for part in parts for entry in items_of(part) or ()]
        return len(joined) == len(whole) and all(map(_equal, whole, joined))
    items = items_of(whole)
    if items is None:
        return True
    columns = [items_of(part) or [] for part in parts]
    if any(len(column) != len(items) for column in columns):
        return False
    return all(map(_same_rows, items, zip(*columns, strict=True), [counts] * len(items)))


def _is_concatenation(whole: Tensor, parts: Sequence[Tensor], dim: int) -> bool:
    try:
        joined = torch.cat(list(parts), dim)
    except (RuntimeError, IndexError, TypeError):  # of other sizes, or a part has None
        return False
    return _equal(whole, joined)


def _equal(left: Any, right: Any) -> bool:
    """Return True for nests of equal tensors; NaN equals NaN. Other values are not compared."""
    pairs = zip(tensors_in(left), tensors_in(right), strict=False)
    return all(
        a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
        if a.is_floating_point() or a.is_complex()
        else torch.equal(a, b)
        for a, b in pairs
    )
