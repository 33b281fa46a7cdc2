"""A data loader of the global batches that a function returns.

It is a loader of single samples, so that Shoal can divide each batch among ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from shoal.data.tree_map import tree_map
from shoal.errors import UsageError

BatchFunction = Callable[[int], tuple[Any, ...]]
"""Step, from 0 -> a global batch: the inputs, then the target. Each is a tensor or a nest of
tensors, with samples in dimension 0.
"""


def loader_of(batch_fn: BatchFunction, steps: int) -> DataLoader:
    """Return a loader of the batches 0 to steps - 1, in this order.

    Raises:
        UsageError: a batch differs in size from the others (only the last one may be smaller), or
            the tensors of one batch have different lengths.
    """
    samples = _Samples([batch_fn(step) for step in range(steps)])
    return DataLoader(samples, batch_size=samples.lengths[0], shuffle=False, collate_fn=_collate)


class _Samples(Dataset):
    """The samples of all batches, one batch after the other.

    Each sample has a batch dimension of 1, so that `_collate` can concatenate.
    """

    def __init__(self, batches: list[tuple[Any, ...]]) -> None:
        self.batches = batches
        self.lengths = [_length(batch, step) for step, batch in enumerate(batches)]
        first = self.lengths[0]
        if any(length != first for length in self.lengths[:-1]) or self.lengths[-1] > first:
            raise UsageError(
                f"batch_fn gave batches of {', '.join(map(str, self.lengths))} samples; all must "
                "have the same number, only the last one may have fewer."
            )

    def __len__(self) -> int:
        return sum(self.lengths)

    def __getitem__(self, index: int) -> Any:
        step, row = divmod(index, self.lengths[0])
        return _row(self.batches[step], row)


def _length(batch: tuple[Any, ...], step: int) -> int:
    """Return the number of samples of a batch. Raises UsageError for a malformed batch."""
    lengths = sorted({len(tensor) for tensor in _tensors(batch)})
    if not isinstance(batch, (tuple, list)) or len(batch) < 2 or len(lengths) != 1:
        raise UsageError(
            f"batch_fn({step}) must give (*inputs, target), all with samples in dimension 0; it "
            f"gave a {type(batch).__name__} of tensors with "
            f"{', '.join(map(str, lengths)) or 'no'} rows."
        )
    return lengths[0]


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a nest, except scalars: those belong to the batch, not to a sample."""
    if isinstance(value, Tensor):
        return [value] if value.dim() else []
    tensors: list[Tensor] = []
    tree_map(value, lambda item: tensors.extend(_tensors(item)))
    return tensors


def _row(value: Any, row: int) -> Any:
    if isinstance(value, Tensor):
        return value[row : row + 1] if value.dim() else value
    return tree_map(value, lambda item: _row(item, row))


def _collate(samples: list[Any]) -> Any:
    """Concatenate samples to a batch with the nesting of `batch_fn`."""
    first = samples[0]
    if isinstance(first, Tensor):
        return torch.cat(samples) if first.dim() else first
    if isinstance(first, dict):
        return {key: _collate([sample[key] for sample in samples]) for key in first}
    if isinstance(first, (tuple, list)):
        items = [_collate(list(column)) for column in zip(*samples, strict=True)]
        is_named_tuple = hasattr(first, "_fields")
        return type(first)(*items) if is_named_tuple else type(first)(items)
    return first
