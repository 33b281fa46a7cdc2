"""The largest entry over ranks, by a maximum that drops NaN as that of some devices does."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from shoal.comm.norm import global_norm, max_with_nan


@pytest.mark.parametrize(
    ("own", "other", "found"),
    [(1.0, 2.0, 2.0), (3.0, 2.0, 3.0), (math.nan, 2.0, math.nan), (1.0, math.nan, math.nan)],
)
def test_nan_of_any_rank_is_the_largest(own: float, other: float, found: float) -> None:
    def reduce_max(pair: Tensor) -> None:
        is_nan = math.isnan(other)
        torch.fmax(pair, torch.tensor([0.0 if is_nan else other, float(is_nan)]), out=pair)

    assert float(max_with_nan(torch.tensor(own), reduce_max)) == pytest.approx(found, nan_ok=True)


def test_the_largest_entry_of_tensors_of_which_one_is_empty() -> None:
    tensors = [torch.tensor([1.0, -4.0]), torch.zeros(0), torch.tensor(3.0, dtype=torch.float64)]
    assert float(global_norm(tensors, math.inf)) == 4.0
    assert float(global_norm(tensors)) == pytest.approx(26**0.5)
