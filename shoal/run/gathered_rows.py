"""Rows that `Run.gather` has gathered before a step with micro-batches, and their comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

TOLERANCE = 1e-3
"""Relative difference of gathered rows between two passes. Repeated kernels differ by rounding."""


class GatheredRows(NamedTuple):
    """The result of one `gather` of a step, for all micro-batches of this rank.

    Attributes:
        rows: of all ranks; a leaf while its gradient is taken.
        windows: the rows of each micro-batch of this rank.
        asked: what the whole loss asks of the rows; None for rows without a gradient.
    """

    rows: Tensor
    windows: list[slice]
    asked: Tensor | None = None


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
