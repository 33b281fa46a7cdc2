"""The rows of a batch, which is a nest of tensors, arrays and lists with one entry per sample.

Any of them, for a trial; and shapes and labels that no batch of a run had before, because a loss
that ignores padding is a mean as long as no sample is padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.data.tree_map import (
    SampleList,
    is_per_sample,
    items_of,
    row_tensors,
    tensors_in,
    tree_map,
)
from shoal.trial.loss_verdict import CannotTry

_WITHOUT_ROWS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum)


def take_rows(value: Any, rows: Tensor, num_samples: int, dims: Sequence[int] = (0, 1)) -> Any:
    """Return the samples `rows` of a nest, copied.

    0-dimensional tensors, numbers and texts belong to all samples and stay as they are. A list with
    one entry per sample gives some of its entries, and nothing inside of them is looked at.

    The step takes neighbouring rows, as views (`take_rows` in shoal/data/tree_map.py). Here, they
    are any rows, and what the step would pass on whole, such as an unknown object, ends the trial.

    Args:
        rows: (m,) int64, on the CPU.
        dims: where samples may lie, the likelier one first: sequences may come with time first.

    Raises: CannotTry: something has no rows that can be told.
    """
    if isinstance(value, (Tensor, np.ndarray)):
        return _rows_of_array(value, rows, num_samples, dims)
    if _has_entry_per_sample(value, num_samples):
        return type(value)(value[row] for row in rows.tolist())
    if isinstance(value, _WITHOUT_ROWS):
        return value
    if items_of(value) is None:
        raise CannotTry(f"a {type(value).__name__}, which cannot be cut into parts")
    return tree_map(value, lambda item: take_rows(item, rows, num_samples, dims))


def choose_rows(batch: Any, num_samples: int, most: int) -> Tensor:
    """Return rows that are to stand for a batch, in order: (m,) int64, m at most `most`.

    They are spread over the batch. Where an integer tensor has negative numbers, which often mark
    what a loss leaves out, up to half of them are rows with its lowest number.
    """
    if num_samples <= most:
        return torch.arange(num_samples)
    marked: list[int] = []
    for tensor in tensors_in(batch):
        if tensor.dtype in (torch.int64, torch.int32) and tensor.shape[:1] == (num_samples,):
            lowest = tensor.min()
            if lowest < 0:
                has_lowest = (tensor == lowest).reshape(num_samples, -1).any(1)
                marked += has_lowest.nonzero().flatten().tolist()
    chosen = dict.fromkeys(marked[:: max(1, 2 * len(marked) // most)][: most // 2])
    for step in range(most):
        chosen.setdefault(step * num_samples // most)
    return torch.tensor(sorted(list(chosen)[:most]))


def _rows_of_array(value: Any, rows: Tensor, num_samples: int, dims: Sequence[int]) -> Any:
    if not value.ndim:
        return value
    dim = next((d for d in dims if value.shape[d : d + 1] == (num_samples,)), None)
    if dim is None:
        raise CannotTry(f"a tensor of shape {tuple(value.shape)} beside {num_samples} samples")
    if isinstance(value, np.ndarray):
        return value.take(rows.numpy(), axis=dim)
    if value.is_nested or value.layout is not torch.strided:
        raise CannotTry("a nested or sparse tensor, which cannot be cut into parts")
    taken = value.detach().index_select(dim, rows.to(value.device))
    return taken.requires_grad_(value.requires_grad)


def _has_entry_per_sample(value: Any, num_samples: int) -> bool:
    """Return True for a list of samples, False for a list of columns.

    A tuple is a list of samples only if it holds texts or numbers, as collated texts do. Other
    tuples may be the state of a recurrent layer, whose tensors have their samples in dimension 1.
    """
    if type(value) is tuple and not all(isinstance(v, (str, bytes, int, float)) for v in value):
        return False
    return type(value) in (list, tuple, SampleList) and is_per_sample(value, num_samples)


MOST_NEWS = 16
"""Batches after which there are no news any more."""
LOOKS_ALWAYS, LOOKS_EVERY = 64, 8
"""Batches that are looked at: the first ones, later every eighth."""
MOST_LABELS = 1 << 16
"""Numbers of the largest tensor whose lowest and highest number are looked at."""


class OtherRows:
    """Remembers which tensors of batches have had other rows than samples, as the boxes of all
    images do: where such a tensor has as many rows as samples, it has them by chance.
    """

    def __init__(self) -> None:
        self._places: set[tuple[int, int, int, torch.dtype]] = set()

    def found_in(self, batch: Any, num_samples: int) -> list[Tensor]:
        """Return such tensors of a batch. Args: num_samples: 0 for a stand-in."""
        tensors, rows = list(row_tensors({0: batch}, num_samples)), max(num_samples, 1)
        places = [(len(tensors), i, t.dim(), t.dtype) for i, t in enumerate(tensors)]
        others = (t.dim() and rows not in t.shape[:2] for t in tensors)
        self._places.update(
            place for place, is_other in zip(places, others, strict=True) if is_other
        )
        return [t for place, t in zip(places, tensors, strict=True) if place in self._places]


class BatchNews:
    """Looks at the batches of a run.

    Attributes:
        has_padding: a label is below 0, as -100 for what a loss leaves out; none was in the first
            batch.
        has_other_rows: the last batch has a tensor whose rows are no samples.
    """

    def __init__(self) -> None:
        self._shapes: set[tuple[torch.Size, ...]] = set()
        self._extremes: dict[int, tuple[int, int]] = {}
        self._batches = 0
        self._news = 0
        self.has_padding = False
        self.has_other_rows = False
        self._other_rows = OtherRows()

    def found_in(self, batch: Any, num_samples: int) -> bool:
        """Return True for a batch with a new shape, or with a label that may mark what a loss
        leaves out: lower or higher than any before, and below 0 or in several places.
        """
        self._batches += 1
        if self._batches > LOOKS_ALWAYS and self._batches % LOOKS_EVERY:
            return False
        self.has_other_rows = bool(self._other_rows.found_in(batch, num_samples))
        if self._news > MOST_NEWS:
            return False
        tensors = list(islice(tensors_in(batch), 8))
        shapes = tuple(tensor.shape for tensor in tensors)
        is_new = shapes not in self._shapes
        self._shapes.add(shapes)
        for index, tensor in enumerate(tensors):
            # On a device, a look at a number would wait for all that runs there.
            is_label = tensor.dtype in (torch.int64, torch.int32) and tensor.device.type == "cpu"
            if is_label and 0 < tensor.numel() <= MOST_LABELS and self._widens(index, tensor):
                is_new = True
        self._news += is_new
        return is_new

    def _widens(self, index: int, labels: Tensor) -> bool:
        lowest, highest = (int(extreme) for extreme in labels.aminmax())
        low, high = self._extremes.setdefault(index, (lowest, highest))
        self.has_padding |= lowest < 0 <= low
        # A rare token or class comes once; padding comes in a row.
        new = [end for end in (lowest, highest) if end < low or end > high]
        new = [end for end in new if end < 0 or int((labels == end).sum()) > 1]
        self._extremes[index] = min(low, *new, low), max(high, *new, high)
        return bool(new)
