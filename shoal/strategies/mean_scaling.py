"""Scale by n, for whoever averages over n ranks what is to be summed.

      loss of a rank     its samples' share of the global mean; all shares sum to that mean
      scaled_for_mean    each rank multiplies its loss and its totals by n
      mean over ranks    (n a + n b + ...) / n  =  a + b + ...

PyTorch's engines, and means in the order of ranks, divide by the number of ranks. These two
functions undo that, for all strategies.
"""

from __future__ import annotations

from torch import Tensor

from shoal.strategies.base import LocalBatch, StepResult


def scaled_for_mean(batch: LocalBatch, num_ranks: int) -> LocalBatch:
    """Return `batch` with `num_ranks` times its weight, so that means over ranks become sums."""
    return batch._replace(grad_weight=batch.grad_weight * num_ranks)


def mean_result(summed_totals: Tensor, num_ranks: int, weighed: bool) -> StepResult:
    """Return the result of a step whose batches went through `scaled_for_mean`.

    Args:
        summed_totals: (SLOTS,), the sum of the totals over `num_ranks` ranks.
        weighed: the loss counted for itself, as in `Loss`.
    """
    return StepResult(summed_totals / num_ranks, weighed)
