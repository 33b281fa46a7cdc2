"""Two results of the same operators, on a batch and where some of its samples are others.

same       x - x.mean(0)     replaced   x' - x'.mean(0)     all rows differ: they are mixed
same       x[order]          replaced   x'[order]           only the replaced ones do
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

MOST_LAYOUTS = 16
"""Ways to lay the samples of all tensors of a batch that are tried."""
MOST_COMPARED = 1 << 22
"""Numbers of samples above which rounding counts as another sample."""
ROUNDING = 1e-5
"""Difference of numbers of samples, as a share of the largest of all, that is rounding."""


def lie_in_order(same: Tensor, replaced: Tensor, replaced_rows: Tensor) -> bool:
    """Return True if a tensor has samples along dimension 0, where the batch has them."""
    if len(same) != len(replaced_rows):
        return False
    is_other = (same != replaced).reshape(len(same), -1).any(1).cpu()
    return not bool((is_other & ~replaced_rows).any())


def mixes_rows(same: Sequence[Tensor], replaced: Sequence[Tensor], replaced_rows: Tensor) -> bool:
    """Return True if samples of a batch are computed from other samples of it.

    Samples in another order, the same in all tensors, are none: a loss that is a mean does not
    change. So samples are counted and not compared by their places.

    Args:
        same, replaced: tensors of a batch, and what they are where some samples were replaced.
        replaced_rows: (samples,) bool. Tensors in which so many samples cannot lie are left out.
    """
    count = len(replaced_rows)
    pairs = []
    for tensor, other in zip(same, replaced, strict=True):
        ways = list(zip(layouts(tensor, count), layouts(other, count), strict=True))
        if ways:
            pairs.append(ways)
    if not pairs:
        return False
    most = int(replaced_rows.sum())
    for number, choice in enumerate(product(*pairs)):
        if number == MOST_LAYOUTS:
            return False
        columns, other_columns = zip(*choice, strict=True)
        before, after = samples_in(columns), samples_in(other_columns)
        gone, new = _rows_missing_in(after, before), _rows_missing_in(before, after)
        if len(new) > most:
            rows = [column[gone] for column in columns], [column[new] for column in other_columns]
            if _beyond_rounding(*rows) > most:
                continue
        return False
    return True


def _rows_missing_in(others: Sequence[bytes], samples: Sequence[bytes]) -> list[int]:
    """Return the rows of `samples` that are not in `others`, or not as often."""
    left = Counter(others)
    rows = []
    for row, sample in enumerate(samples):
        if left[sample] > 0:
            left[sample] -= 1
        else:
            rows.append(row)
    return rows


def _beyond_rounding(columns: Sequence[Tensor], others: Sequence[Tensor]) -> int:
    """Return how many rows of `others` are no row of `columns`, also but for rounding.

    A shift by the largest number of a batch, before an exponential, changes the last bits alone.
    """
    if sum(column.numel() for column in others) > MOST_COMPARED:
        return len(others[0])
    scales = [
        column.detach().double().abs().amax().clamp(min=1e-300) if column.is_floating_point() else 1
        for column in columns
    ]
    rows, new = (
        torch.cat([column.detach().double() / s for column, s in zip(each, scales, strict=True)], 1)
        for each in (columns, others)
    )
    nearest = torch.cdist(new, rows, p=torch.inf).amin(1)
    return int((~(nearest <= ROUNDING)).sum())


def layouts(tensor: Tensor, count: int) -> list[Tensor]:
    """Return the ways in which so many samples can lie in a tensor, each as (samples, ...)."""
    if not tensor.dim() or not tensor.numel():
        return []
    ways = []
    each, rest = divmod(tensor.shape[0], count)
    if not rest:
        ways.append(tensor.reshape(count, -1))
        if each > 1:  # torch.cat([view, other view])
            ways.append(tensor.reshape(each, count, -1).transpose(0, 1).reshape(count, -1))
    if tensor.dim() > 1 and tensor.shape[1] == count:  # (sequence, samples, ...)
        ways.append(tensor.transpose(0, 1).reshape(count, -1))
    return ways


def samples_in(columns: Sequence[Tensor]) -> list[bytes]:
    """Return the bytes of each sample."""
    parts = [
        # Of one number in each row, contiguous strides may be others than 1.
        column.detach().cpu().contiguous().view(-1).view(torch.uint8).reshape(len(column), -1)
        for column in columns
    ]
    return [row.tobytes() for row in torch.cat(parts, 1).numpy()]
