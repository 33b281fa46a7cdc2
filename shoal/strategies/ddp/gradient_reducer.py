"""A step of data parallel training: passes on each rank, then means of gradients over ranks.

      layout (when)                                                    reduce function (how)
      OwnBuckets     buckets beside the backward pass, or after it     RankOrderMean, CompressedMean
      TorchEngine    torch's DistributedDataParallel                   RankOrderMean, NamedMean

Both layouts send the totals of a step with the gradients, so the global loss costs no
synchronisation. `strategy.py` chooses the layout and the function of a run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from shoal.strategies.base import Forward, LocalBatch, LocalModel, StepResult
from shoal.strategies.ddp.reduce_functions import ReduceFunction
from shoal.strategies.local_step import scaled_for_mean


class GradientReducer(ABC):
    """Averages gradients over the ranks of the data axis, by one reduce function.

    A subclass decides which gradients are sent in one message, and when; equally on all ranks.
    """

    def __init__(self, model: LocalModel, reduce: ReduceFunction, num_ranks: int) -> None:
        self.model = model
        self.reduce = reduce
        self.num_ranks = num_ranks

    @property
    def forward(self) -> Forward:
        """Forward function of the reduced model: a micro-batch and its loss."""
        return self.model.forward

    def forward_backward(self, forward: Forward, batch: LocalBatch) -> StepResult:
        """Compute both passes of one micro-batch. Collective.

        After the last one of a step, gradients and totals are means over ranks. `scaled_for_mean`
        makes them global means and sums.
        """
        if batch.previous_totals is None:
            self.start_step()
        local = self.run(forward, scaled_for_mean(batch, self.num_ranks))
        if not batch.is_last_microbatch:
            return local
        return local._replace(step_totals=self.finish_step(local.step_totals))

    @abstractmethod
    def start_step(self) -> None:
        """Prepare for the first micro-batch of a step. Collective.

        It drops the messages of an earlier step that an error has ended. Ranks may have different
        numbers of micro-batches; each rank calls this once in a step.
        """

    @abstractmethod
    def run(self, forward: Forward, batch: LocalBatch) -> StepResult:
        """Compute both passes of a micro-batch. The last one may start to reduce.

        Returns: totals of this rank.
        """

    @abstractmethod
    def finish_step(self, totals: Tensor) -> Tensor:
        """Wait until every `.grad` is the mean over ranks. Collective.

        A parameter that no rank has used has no gradient afterwards.

        Args: totals: (TOTALS_LENGTH,), of this rank.

        Returns: (TOTALS_LENGTH,), their mean over ranks.
        """

    def close(self) -> None:
        """Release threads, process groups, and all objects that hold one."""
        self.reduce.close()
