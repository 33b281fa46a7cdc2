"""Shapes and labels that no batch of a run had before.

A loss that leaves out padding is a mean until the first padded sample comes.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from torch import Tensor

from shoal.data.tree_map import tensors_in

MOST_NEWS = 16
"""Batches after which there are no news any more."""
LOOKS_ALWAYS, LOOKS_EVERY = 64, 8
"""Batches that are looked at: the first ones, later every eighth."""
MOST_LABELS = 1 << 16
"""Numbers of the largest tensor whose lowest and highest number are looked at."""


class BatchNews:
    """Looks at the batches of a run.

    Attributes: has_padding: a label is below 0, as -100 for what a loss leaves out; none was in the
        first batch.
    """

    def __init__(self) -> None:
        self._shapes: set[tuple[torch.Size, ...]] = set()
        self._extremes: dict[int, tuple[int, int]] = {}
        self._batches = 0
        self._news = 0
        self.has_padding = False

    def found_in(self, batch: Any) -> bool:
        """Return True for a batch with a new shape, or a lower or higher label than any before."""
        self._batches += 1
        looks = self._batches <= LOOKS_ALWAYS or self._batches % LOOKS_EVERY == 0
        if not looks or self._news > MOST_NEWS:
            return False
        tensors = list(islice(tensors_in(batch), 8))
        shapes = tuple(tensor.shape for tensor in tensors)
        is_new = shapes not in self._shapes
        self._shapes.add(shapes)
        for index, tensor in enumerate(tensors):
            if _is_label(tensor) and self._widens(index, tensor):
                is_new = True
        self._news += is_new
        return is_new

    def _widens(self, index: int, labels: Tensor) -> bool:
        lowest, highest = (int(extreme) for extreme in labels.aminmax())
        low, high = self._extremes.get(index, (lowest, highest))
        self._extremes[index] = min(low, lowest), max(high, highest)
        self.has_padding |= lowest < 0 <= low
        return lowest < low or highest > high


def _is_label(tensor: Tensor) -> bool:
    # On a device, a look at a number would wait for all that runs there.
    is_integer = tensor.dtype in (torch.int64, torch.int32)
    return is_integer and tensor.device.type == "cpu" and 0 < tensor.numel() <= MOST_LABELS
