"""Reduce functions: they replace gradients by means over the ranks of the data axis.

      RankOrderMean    exact; on the CPU every value is summed in the order of ranks, at any offset
                       of a message
      NamedMean        exact; summed in the order of a named algorithm, such as ring or tree
      CompressedMean   in fewer bytes: rounded, or with error feedback in later steps

A layout decides when they are called.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from shoal.comm.algorithms.all_reduce import NamedAllReduce
from shoal.comm.axis import Axis
from shoal.comm.compression.base import BucketEntry, CompressedReducer
from shoal.comm.deterministic import (
    mean,
    needs_order,
    rank_order_mean,
    register_overlapped_reduce,
    sums_in_order,
    use_ordered_mean,
)
from shoal.strategies.state import STATELESS, StrategyState

WORLD_CHANGED_MESSAGE = (
    "compress: the number of ranks has changed, and what messages had left out was each rank's "
    "own: it is lost, and the memories begin at zero"
)


class ReduceFunction(ABC):
    """Means over ranks. Every rank calls it for the same messages in the same order.

    Attributes:
        blocks: True if only `mean` gives these values. It waits for other ranks, so a layout that
            overlaps it with the backward pass needs a thread. False if the backend's asynchronous
            all-reduce gives the same values.
        summary_lines: lines for the beginning of a run.
        strategy_state: state from step to step, for checkpoints.
    """

    blocks: bool
    summary_lines: tuple[str, ...] = ()
    strategy_state: StrategyState = STATELESS

    @abstractmethod
    def mean(self, message: Tensor, members: Sequence[BucketEntry] = ()) -> None:
        """Replace `message` by its mean over ranks. Collective.

        Args: members: parameters whose gradients the message holds, one after the other. Empty for
            a message of other values.
        """

    def register_hook(
        self,
        ddp: DistributedDataParallel,
        errors: list[Exception],
        look: Callable[[Tensor], object],
    ) -> None:
        """Register this function as the communication hook of `ddp`. Collective over the world.

        Args:
            errors: receives the errors of buckets; to be checked after each backward pass.
            look: is given each bucket of this rank before it is sent, where a hook sends it.
        """

        def look_and_reduce(bucket: Tensor) -> None:
            look(bucket)
            self.mean(bucket)

        register_overlapped_reduce(ddp, look_and_reduce, errors)

    def finish_step(self, names: Collection[str]) -> None:
        """End a step in which the parameters `names` got a mean.

        Without names, drop the state of a step that an error has ended.
        """
        return

    @abstractmethod
    def close(self) -> None:
        """Release process groups."""


class RankOrderMean(ReduceFunction):
    """The exact mean. On the CPU values are summed in the order of ranks."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.blocks = needs_order(axis)

    def mean(self, message: Tensor, members: Sequence[BucketEntry] = ()) -> None:
        mean(message, self.axis)

    def register_hook(
        self,
        ddp: DistributedDataParallel,
        errors: list[Exception],
        look: Callable[[Tensor], object],
    ) -> None:
        # Without a hook the engine's own all-reduce gives the same values. Where the hook costs no
        # more than that, it is there to look.
        if self.blocks or (self.axis.device.type == "cpu" and sums_in_order(ddp.process_group)):
            use_ordered_mean(ddp, self.axis, errors, look)

    def close(self) -> None:
        self.axis = replace(self.axis, group=None)


class NamedMean(ReduceFunction):
    """The exact mean by a named algorithm. Its constructor is collective over the world.

    Args: name: as for `NamedAllReduce`.
    """

    blocks = True

    def __init__(self, name: str, axis: Axis) -> None:
        self.algorithm = NamedAllReduce(name, axis)
        self.summary_lines = self.algorithm.summary_lines()

    def mean(self, message: Tensor, members: Sequence[BucketEntry] = ()) -> None:
        self.algorithm.mean(message)

    def close(self) -> None:
        self.algorithm.close()


class CompressedMean(ReduceFunction):
    """The mean of compressed gradients. Messages of other values are averaged exactly.

    Args: summary: line with the bytes that compression saves.
    """

    blocks = True

    def __init__(self, compression: CompressedReducer, axis: Axis, summary: str) -> None:
        self.compression = compression
        self.summary_lines = (summary,)
        self.strategy_state = (
            ErrorFeedbackState(compression) if compression.has_error_feedback else STATELESS
        )
        self._group: dist.ProcessGroup | None = axis.group

    def mean(self, message: Tensor, members: Sequence[BucketEntry] = ()) -> None:
        if members:
            self.compression.mean(message, members, self._group)
        else:
            rank_order_mean(message, self._group)

    def finish_step(self, names: Collection[str]) -> None:
        self.compression.keep(names)

    def close(self) -> None:
        self._group = None


class ErrorFeedbackState(StrategyState):
    """Residuals that messages have left out, for checkpoints. Each rank has its own."""

    in_gradient_units = True

    def __init__(self, compression: CompressedReducer) -> None:
        self.compression = compression

    def rank_state_dict(self) -> dict[str, Tensor]:
        return self.compression.rank_state_dict()

    def load_state_dict(
        self, state: Mapping[str, Tensor], private: Mapping[str, Tensor]
    ) -> list[str]:
        self.compression.load(private)
        return [] if private else [WORLD_CHANGED_MESSAGE]
