"""Rows that differ in their last bits alone are not computed from other samples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shoal.trial.mixed_rows import mixes_rows
from shoal.trial.replaced_rows import ReplacedRows

ROWS = 6
REPLACED = torch.arange(ROWS) < 2


def log_sum_exp(x: Tensor) -> Tensor:
    """Shift by the largest number of the batch, as ssd.pytorch does."""
    shift = x.max()
    return (x - shift).exp().sum(1).log() + shift


@pytest.mark.parametrize(
    ("compute", "mixes"),
    [
        (log_sum_exp, False),
        (lambda x: x - x.mean(0), True),
        (lambda x: (x / x.abs().max() * 1e6).long(), True),
    ],
)
def test_a_shift_by_the_largest_of_all_is_rounding(
    compute: Callable[[Tensor], Tensor], mixes: bool
) -> None:
    x = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0)) * 4
    replaced = torch.where(REPLACED[:, None], 2 * x.flip(0), x)
    assert mixes_rows([compute(x)], [compute(replaced)], REPLACED) is mixes


def test_samples_of_one_number_may_lie_in_any_strides() -> None:
    x = torch.arange(12.0).reshape(1, 12)[:, ::2].T  # (6, 1), with the strides (2, 12)
    assert mixes_rows([x - x.mean()], [2 * x - x.mean()], REPLACED)
    assert not mixes_rows([x], [torch.where(REPLACED[:, None], x + 1, x)], REPLACED)


def test_batches_that_are_views_of_one_tensor_have_replaced_rows_of_their_own() -> None:
    whole, rows = torch.randn(10, ROWS), ReplacedRows()
    for batch in (whole[:6], whole[6:]):
        replaced = torch.arange(len(batch)) < 2
        rows.copy_rows([batch], replaced, torch.arange(len(batch)).flip(0))
        rows.end_step()
        copies = rows.copies_of(batch)
        assert copies is not None
        assert copies[2] is replaced
