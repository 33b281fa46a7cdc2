"""Factors that turn a mean over n ranks into a sum.

      loss of a rank     weighted by its share of the global batch; all losses sum to the mean
      scaled_for_mean    each rank multiplies its loss and its totals by n
      mean over ranks    (n a + n b + ...) / n  =  a + b + ...

PyTorch's engines, and rank-order means, divide by the number of ranks. Every strategy undoes that
division with these two functions.
"""

from __future__ import annotations

from torch import Tensor

from shoal.strategies.base import LocalBatch, StepResult


def scaled_for_mean(batch: LocalBatch, num_ranks: int) -> LocalBatch:
    """Return `batch` with `num_ranks` times its weight, so that means over ranks become sums."""
    return batch._replace(grad_weight=batch.grad_weight * num_ranks)


def mean_result(local: StepResult, summed_totals: Tensor, num_ranks: int) -> StepResult:
    """Return the result of a step whose batches went through `scaled_for_mean`.

    Args:
        local: the result of this rank.
        summed_totals: (TOTALS_LENGTH,), the sum of the totals over `num_ranks` ranks.
    """
    return local._replace(step_totals=summed_totals / num_ranks)
