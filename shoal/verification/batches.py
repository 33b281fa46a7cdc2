"""A loader of the global batches that a function gives, row by row, so that they can be shared
out.
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
"""Step, from 0 -> a global batch: inputs, then the target; nests of tensors with samples in
dimension 0.
"""


def loader_of(batch_fn: BatchFunction, steps: int) -> DataLoader:
    """Batches 0 to steps - 1, in this order.

    Raises: UsageError: batches of different size, except for a smaller last one; tensors of
    different length in one."""
    rows = _Rows([batch_fn(step) for step in range(steps)])
    return DataLoader(rows, batch_size=rows.lengths[0], shuffle=False, collate_fn=_joined)


class _Rows(Dataset):
    """Sample i is row i of all batches, one after the other."""

    def __init__(self, batches: list[tuple[Any, ...]]) -> None:
        self.batches = batches
        self.lengths = [_length(batch, step) for step, batch in enumerate(batches)]
        first = self.lengths[0]
        if any(length != first for length in self.lengths[:-1]) or self.lengths[-1] > first:
            raise UsageError(
                f"batch_fn gave batches of {', '.join(map(str, self.lengths))} samples; all must "
                "have the same number, "
                "only the last one may have fewer."
            )

    def __len__(self) -> int:
        return sum(self.lengths)

    def __getitem__(self, index: int) -> Any:
        step, row = divmod(index, self.lengths[0])
        return _row(self.batches[step], row)


def _length(batch: tuple[Any, ...], step: int) -> int:
    lengths = sorted({len(tensor) for tensor in _tensors(batch)})
    if not isinstance(batch, (tuple, list)) or len(batch) < 2 or len(lengths) != 1:
        raise UsageError(
            f"batch_fn({step}) must give (*inputs, target), all with samples in dimension 0; it "
            "gave a "
            f"{type(batch).__name__} of tensors with {', '.join(map(str, lengths)) or 'no'} rows."
        )
    return lengths[0]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.dim() else []
    found: list[Tensor] = []
    tree_map(value, lambda item: found.extend(_tensors(item)))
    return found


def _row(value: Any, row: int) -> Any:
    if isinstance(value, Tensor):
        return value[row : row + 1] if value.dim() else value
    return tree_map(value, lambda item: _row(item, row))


def _joined(rows: list[Any]) -> Any:
    """The rows under each other again."""
    first = rows[0]
    if isinstance(first, Tensor):
        return torch.cat(rows) if first.dim() else first
    if isinstance(first, dict):
        return {key: _joined([row[key] for row in rows]) for key in first}
    if isinstance(first, (tuple, list)):
        items = [_joined(list(column)) for column in zip(*rows, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    return first
