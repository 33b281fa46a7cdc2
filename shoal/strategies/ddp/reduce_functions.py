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
from functools import partial

import torch.distributed as dist
from torch import Tensor

from shoal.comm.algorithms import (
    PairwiseLink,
    hierarchical,
    hosts_of,
    new_host_group,
    ring,
    tree,
)
from shoal.comm.axis import Axis, new_group
from shoal.comm.compression.base import BucketEntry
from shoal.comm.compression.error_feedback import CompressedReducer
from shoal.comm.deterministic import mean, needs_order, rank_order_mean
from shoal.strategies.state import STATELESS, StrategyState

WORLD_CHANGED_MESSAGE = (
    "compress: the number of ranks has changed, and the residuals of error feedback were those of "
    "each rank: they are lost, and begin at zero"
)
PAIRWISE = {"ring": ring, "tree": tree}
POSITION_NOTE = (
    "note: this all-reduce adds in an order that depends on where in which bucket a number lies, "
    "so a run that is stopped and resumed can differ from an undisturbed one in the last bit. With "
    "allreduce=tree it does not."
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

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    @abstractmethod
    def mean(self, message: Tensor, members: Sequence[BucketEntry] = ()) -> None:
        """Replace `message` by its mean over ranks. Collective.

        Args: members: parameters whose gradients the message holds, one after the other. Empty for
            a message of other values.
        """

    def finish_step(self, names: Collection[str]) -> None:
        """End a step in which the parameters `names` got a mean.

        Without names, drop the state of a step that an error has ended.
        """
        return

    def close(self) -> None:
        """Release process groups."""
        self.axis = replace(self.axis, group=None)


class RankOrderMean(ReduceFunction):
    """The exact mean. On the CPU values are summed in the order of ranks."""

    def __init__(self, axis: Axis) -> None:
        super().__init__(axis)
        self.blocks = needs_order(axis)

    def mean(self, message: Tensor, members: Sequence[BucketEntry] = ()) -> None:
        mean(message, self.axis)


class NamedMean(ReduceFunction):
    """The exact mean by a named algorithm, during the backward pass. Its constructor is collective
    over the world.

    A rank that has failed must end its process: Gloo cannot inform its neighbours, which then wait
    for the group's time-out.

    Args:
        name: ring, tree or hierarchical.
        axis: the axis to average over.
    """

    blocks = True

    def __init__(self, name: str, axis: Axis) -> None:
        super().__init__(axis)
        hosts_of_groups = hosts_of(axis)
        hosts = next(each for each in hosts_of_groups if dist.get_rank() in sum(each, ()))
        # New groups, so that messages during the backward pass cannot mix with others.
        group = new_group(axis.all_groups)
        members = sorted(sum(hosts, ()))
        leaders = [members.index(ranks[0]) for ranks in hosts]
        if name == "hierarchical":
            self._sum: Callable[[Tensor], None] | None = partial(
                hierarchical,
                host_group=new_host_group(hosts_of_groups),
                leaders=PairwiseLink(group, leaders) if axis.rank in leaders else None,
            )
        else:
            self._sum = partial(PAIRWISE[name], pairs=PairwiseLink(group))
        over = f"{axis.size} ranks on {len(hosts)} host{'s' * (len(hosts) > 1)}"
        self.summary_lines = (f"all-reduce: {name}, over {over}",)
        if (name == "ring" and axis.size > 2) or (name == "hierarchical" and len(hosts) > 2):
            self.summary_lines += (POSITION_NOTE,)

    def mean(self, message: Tensor, members: Sequence[BucketEntry] = ()) -> None:
        assert self._sum is not None
        flat = message.reshape(-1)
        self._sum(flat)
        flat.div_(self.axis.size)
        if flat.data_ptr() != message.data_ptr():  # `reshape` has made a copy
            message.copy_(flat.view_as(message))

    def close(self) -> None:
        super().close()
        self._sum = None


class CompressedMean(ReduceFunction, StrategyState):
    """The mean of compressed gradients. Messages of other values are averaged exactly.

    With error feedback it is a state too: each rank has its own residuals, which messages have left
    out.
    """

    blocks = True
    in_gradient_units = True

    def __init__(self, compression: CompressedReducer, axis: Axis) -> None:
        super().__init__(axis)
        self.compression = compression
        self.strategy_state = self if compression.prefixes else STATELESS

    def mean(self, message: Tensor, members: Sequence[BucketEntry] = ()) -> None:
        if members:
            self.compression.mean(message, members, self.axis.group)
        else:
            rank_order_mean(message, self.axis.group)

    def finish_step(self, names: Collection[str]) -> None:
        self.compression.keep(names)

    def rank_state_dict(self) -> dict[str, Tensor]:
        return self.compression.rank_state_dict()

    def load_state_dict(
        self, state: Mapping[str, Tensor], private: Mapping[str, Tensor]
    ) -> list[str]:
        self.compression.load(private)
        return [] if private else [WORLD_CHANGED_MESSAGE]
