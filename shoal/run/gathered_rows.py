"""Rows that `Run.gather` has gathered before a step with micro-batches, and their comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.data.tree_map import tensors_in

TOLERANCE = 1e-3
"""Relative difference of gathered rows between two passes. Repeated kernels differ by rounding."""


class OwnRows(NamedTuple):
    """Rows of one micro-batch that were given to `gather`."""

    rows: Tensor
    is_data: bool
    """They are rows of the batch, which no gradient is asked of."""


class GatheredRows(NamedTuple):
    """The result of one `gather` of a step, for all micro-batches of this rank.

    Attributes:
        rows: of all ranks; a leaf while its gradient is taken.
        windows: the rows of each micro-batch of this rank.
        asked: what the whole loss asks of the rows; None for rows without a gradient.
        is_data: they are rows of batches, so any stage of a pipeline may use them.
    """

    rows: Tensor
    windows: list[slice]
    asked: Tensor | None = None
    is_data: bool = False

    @property
    def needs_gradient(self) -> bool:
        """True for rows of which the loss may ask something."""
        return self.rows.is_floating_point() and not self.is_data


def places_of_data(batch: Any) -> set[int]:
    """Return where in memory the tensors of a batch begin that need no gradient."""
    return {t.data_ptr() for t in tensors_in(batch) if t.numel() and not t.requires_grad}


def shapes_of_rows(gathered: Sequence[GatheredRows]) -> list[list[int]]:
    """Return the shape of each gather's rows."""
    return [list(each.rows.shape) for each in gathered]


def gave_again(given: Sequence[Tensor], before: Sequence[Tensor]) -> bool:
    """Return True if a pass gave the same rows to `run.gather` as the one before."""
    return len(before) == len(given) and all(map(_close, given, before))


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    return torch.allclose(one.detach(), other, rtol=TOLERANCE, atol=1e-6, equal_nan=True)
