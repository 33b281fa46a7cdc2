"""The mean over an axis by a named algorithm, for gradients during the backward pass."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from shoal.comm.algorithms import hierarchical, ring, tree
from shoal.comm.algorithms.algorithm_names import NAMES
from shoal.comm.algorithms.hierarchical import hosts_of, new_host_group
from shoal.comm.algorithms.send_recv import PairwiseLink
from shoal.comm.axis import Axis, new_group
from shoal.comm.deterministic import rank_order_mean

PAIRWISE = {"ring": ring.all_reduce, "tree": tree.all_reduce}
"""Algorithms whose only arguments are a tensor and a `PairwiseLink`."""


class NamedAllReduce:
    """A mean over ranks by one algorithm. The constructor is collective over the world.

    Args:
        name: one of NAMES.
        axis: the axis to average over.

    Attributes:
        hosts: the ranks of this rank's group by host.
    """

    def __init__(self, name: str, axis: Axis) -> None:
        assert name in NAMES, name
        self.name = name
        self.axis = axis
        hosts_of_groups = hosts_of(axis)
        self.hosts = next(
            hosts for hosts in hosts_of_groups if any(dist.get_rank() in ranks for ranks in hosts)
        )
        # New groups, so that messages during the backward pass cannot mix with others.
        self._group: dist.ProcessGroup | None = new_group(axis.all_groups)
        self._pairs: PairwiseLink | None = PairwiseLink(self._group)
        self._host_group = new_host_group(hosts_of_groups) if name == "hierarchical" else None
        members = sorted(rank for ranks in self.hosts for rank in ranks)
        leaders = [members.index(ranks[0]) for ranks in self.hosts]
        self._leaders = PairwiseLink(self._group, leaders) if axis.rank in leaders else None

    def describe(self) -> str:
        """Describe the algorithm and its ranks for the summary of the run."""
        over = f"{self.axis.size} ranks on {len(self.hosts)} host{'s' * (len(self.hosts) > 1)}"
        return f"all-reduce: {self.name}, over {over}"

    def summary_lines(self) -> tuple[str, ...]:
        """Return the lines for the summary of the run."""
        note = (
            "note: this all-reduce adds in an order that depends on where in which bucket a number "
            "lies, so a run that is stopped and resumed can differ from an undisturbed one in the "
            "last bit. With allreduce=tree it does not."
        )
        return (self.describe(), note) if self.depends_on_position else (self.describe(),)

    @property
    def depends_on_position(self) -> bool:
        """True if the bits of a sum depend on the element's position or on the tensor's length."""
        return (self.name == "ring" and self.axis.size > 2) or (
            self.name == "hierarchical" and len(self.hosts) > 2
        )

    def mean(self, tensor: Tensor) -> Tensor:
        """Average `tensor` over all ranks, in place, with the same bits on each.
        Collective; one call at a time.

        A rank that has failed must end its process: Gloo cannot inform its neighbours, which then
        wait for the group's time-out.

        Raises:
            RuntimeError: a rank from which a message is needed has ended, or does not come in time.
                No later call works.
        """
        if self.name == "backend":
            return rank_order_mean(tensor, self._group)
        flat = tensor.reshape(-1)
        if self.name == "hierarchical":
            hierarchical.all_reduce(flat, self._host_group, self._leaders)
        else:
            assert self._pairs is not None
            PAIRWISE[self.name](flat, self._pairs)
        flat.div_(self.axis.size)
        if flat.data_ptr() != tensor.data_ptr():  # `reshape` has made a copy
            tensor.copy_(flat.view_as(tensor))
        return tensor

    def close(self) -> None:
        """Drop all references to the process groups."""
        self._group = None
        self._host_group = None
        self._pairs = None
        self._leaders = None
