"""A step of data parallel training: each rank's passes, then gradients that are means over ranks.

      layout (when)                                                 reduce function (how)
      SingleMessage       one message after the backward pass       RankOrderMean
      OverlappedBuckets   buckets while the backward pass goes on   RankOrderMean, CompressedMean
      TorchEngine         torch's DistributedDataParallel           RankOrderMean, NamedMean

The totals of a step travel with the gradients in every layout, so the global loss costs no message
of its own. `layout_choice.py` says which layout and which function a run gets, and why.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from shoal.strategies.base import Forward, LocalBatch, LocalModel, StepResult
from shoal.strategies.ddp.reduce_functions import ReduceFunction
from shoal.strategies.mean_scaling import scaled_for_mean


class GradientLayout(ABC):
    """Decides which gradients travel together, and when. Every rank makes the same one."""

    def __init__(self, part: LocalModel) -> None:
        self.part = part

    @property
    def forward(self) -> Forward:
        """A micro-batch through the model and the loss."""
        return self.part.forward

    @abstractmethod
    def start_step(self) -> None:
        """Prepare for the first micro-batch of a step, also after one that an error has ended.

        Collective: ranks may have different numbers of micro-batches, and each calls this once.
        """

    def run(self, forward: Forward, batch: LocalBatch) -> StepResult:
        """Run both passes of a micro-batch; the last one may begin to reduce. Totals are local."""
        return self.part.run(forward, batch)

    @abstractmethod
    def finish_step(self, totals: Tensor) -> Tensor:
        """Wait until every `.grad` is the mean over ranks. Collective.

        A parameter that no rank has used has no gradient then.

        Args: totals: (SLOTS,), of this rank.

        Returns: (SLOTS,), their mean over ranks.
        """

    def close(self) -> None:
        """Let go of threads and engines that hold a process group, if there are any."""
        return


class GradientReducer:
    """Averages gradients over the ranks of the data axis, by one layout and one reduce function."""

    def __init__(self, layout: GradientLayout, reduce: ReduceFunction, num_ranks: int) -> None:
        self.layout = layout
        self.reduce = reduce
        self.num_ranks = num_ranks
        self.forward = layout.forward

    def forward_backward(self, forward: Forward, batch: LocalBatch) -> StepResult:
        """Run both passes of one micro-batch. Collective.

        With the last one of a step, gradients and totals are those of all ranks.
        """
        if batch.previous_totals is None:
            self.layout.start_step()
        local = self.layout.run(forward, scaled_for_mean(batch, self.num_ranks))
        if not batch.is_last_microbatch:
            return local
        return StepResult(self.layout.finish_step(local.step_totals), local.is_sum_and_count)

    def close(self) -> None:
        """Let go of process groups, and of all that holds one."""
        self.layout.close()
        self.reduce.close()
