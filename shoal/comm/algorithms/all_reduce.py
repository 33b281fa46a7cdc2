"""The mean over a line of ranks by an algorithm that has a name, for gradients beside the
backward pass.
"""

from __future__ import annotations

from contextlib import suppress

import torch.distributed as dist
from torch import Tensor

from shoal.comm.algorithms import halving_doubling, hierarchical, ring, tree
from shoal.comm.algorithms.algorithm_names import NAMES
from shoal.comm.algorithms.send_recv import PairwiseLink
from shoal.comm.algorithms.topology import group_inside, hosts_of
from shoal.comm.axis import Axis, new_group
from shoal.comm.deterministic import rank_order_mean
from shoal.errors import CollectiveFailed, PeerLost
from shoal.platform.torch_private.c10d import default_store

BACKEND_DEFAULT = {
    "ring": ring.all_reduce,
    "tree": tree.all_reduce,
    "halving-doubling": halving_doubling.all_reduce,
}
"""Algorithms that take a tensor and pairs of ranks, and know of no hosts."""


class NamedAllReduce:
    """The mean over ranks by one algorithm. Every rank of the world makes it together.

    Args:
        name: one of NAMES.
        axis: whose ranks are averaged over.

    Attributes:
        hosts: the ranks of this line by host.
    """

    def __init__(self, name: str, axis: Axis) -> None:
        assert name in NAMES, name
        self.name, self.axis = name, axis
        lines = hosts_of(axis)
        self.hosts = next(
            hosts for hosts in lines if any(dist.get_rank() in ranks for ranks in hosts)
        )
        self._failed: CollectiveFailed | None = None
        # Groups of its own: what is sent beside the backward pass must not come between other
        # messages.
        self._group: dist.ProcessGroup | None = new_group(axis.all_groups)
        self._pairs: PairwiseLink | None = PairwiseLink(self._group)
        self._inside = group_inside(lines) if name == "hierarchical" else None
        line = sorted(rank for ranks in self.hosts for rank in ranks)
        leaders = [line.index(ranks[0]) for ranks in self.hosts]
        self._leaders = PairwiseLink(self._group, leaders) if axis.rank in leaders else None

    def describe(self) -> str:
        """One line for the run's header."""
        over = f"{self.axis.size} ranks on {len(self.hosts)} host{'s' * (len(self.hosts) > 1)}"
        return f"all-reduce: {self.name}, over {over}"

    def summary_lines(self) -> tuple[str, ...]:
        """Lines for the run's header."""
        note = (
            "note: this all-reduce adds in an order that depends on where in which bucket a number "
            "lies, so a run that "
            "is stopped and resumed can differ from an undisturbed one in the last bit. With "
            "allreduce=tree or "
            "halving-doubling it does not."
        )
        return (self.describe(), note) if self.place_matters else (self.describe(),)

    @property
    def place_matters(self) -> bool:
        """Whether the last bit of a sum depends on where in a tensor, or in how large a one, a
        number lies.
        """
        return (self.name == "ring" and self.axis.size > 2) or (
            self.name == "hierarchical" and len(self.hosts) > 2
        )

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean over all ranks, in place, the same bits on each. Collective; one call at a time.

        A rank that has failed must end its process: Gloo has no way to tell its neighbours, who
        then wait for the group's time-out.

        Raises: CollectiveFailed: a rank does not come in time. PeerLost: one is gone. No later call
        works either."""
        if self._failed is not None:
            raise self._failed
        try:
            self._mean(tensor)
        except RuntimeError as error:
            self._failed = self._reason(error)
            raise self._failed from None
        return tensor

    def close(self) -> None:
        """Let go of the process groups."""
        self._group = self._inside = self._pairs = self._leaders = None

    def _mean(self, tensor: Tensor) -> None:
        if self.name == "backend":
            rank_order_mean(tensor, self._group)
            return
        flat = tensor.reshape(-1)
        if self.name == "hierarchical":
            hierarchical.all_reduce(flat, self._inside, self._leaders)
        else:
            assert self._pairs is not None
            BACKEND_DEFAULT[self.name](flat, self._pairs)
        flat.div_(self.axis.size)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view_as(tensor))

    def _reason(self, error: RuntimeError) -> CollectiveFailed:
        """What broke first: a rank that fails ends, so its neighbours fail, and theirs. The
        first one leaves a note.
        """
        mine = (
            error
            if isinstance(error, CollectiveFailed)
            else CollectiveFailed(f"all-reduce {self.name}: {error}")
        )
        assert self._group is not None
        with suppress(RuntimeError):  # the store may have died with its rank
            store, key = default_store(), f"shoal/lost/{self._group.group_name}"
            first = store.compare_set(key, "", f"{type(mine).__name__} {mine}").decode()
            kind, _, text = first.partition(" ")
            return (PeerLost if kind == "PeerLost" else CollectiveFailed)(text)
        return mine
