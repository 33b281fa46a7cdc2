"""A data loader of the global batches that a function returns, which Shoal divides among ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, Dataset

from shoal.data.batch_fetcher import identity_collate
from shoal.data.tree_map import tensors_in
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
    batches = _ReadyBatches([batch_fn(step) for step in range(steps)])
    return DataLoader(batches, batch_size=None, shuffle=False, collate_fn=identity_collate)


class _ReadyBatches(Dataset):
    def __init__(self, batches: list[tuple[Any, ...]]) -> None:
        self.batches = batches
        lengths = [_length(batch, step) for step, batch in enumerate(batches)]
        if any(length != lengths[0] for length in lengths[:-1]) or lengths[-1] > lengths[0]:
            raise UsageError(
                f"batch_fn gave batches of {', '.join(map(str, lengths))} samples; all must "
                "have the same number, only the last one may have fewer."
            )

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, step: int) -> tuple[Any, ...]:
        return tuple(self.batches[step])


def _length(batch: tuple[Any, ...], step: int) -> int:
    """Return the number of samples of a batch. Raises UsageError for a malformed batch."""
    # Scalars belong to the batch, not to a sample.
    lengths = sorted({len(tensor) for tensor in tensors_in(batch) if tensor.dim()})
    if not isinstance(batch, (tuple, list)) or len(batch) < 2 or len(lengths) != 1:
        raise UsageError(
            f"batch_fn({step}) must give (*inputs, target), all with samples in dimension 0; it "
            f"gave a {type(batch).__name__} of tensors with "
            f"{', '.join(map(str, lengths)) or 'no'} rows."
        )
    return lengths[0]
