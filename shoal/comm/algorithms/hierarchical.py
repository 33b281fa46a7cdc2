"""All-reduce in two layers: inside each host through shared memory, and between hosts by one rank
of each, its leader.

      host A   rank 0   a       [1] inside   a + b   ─┐  [2] a ring     S       [3] inside   S
               rank 1   b           ──────>            │     of leaders             ──────>   S
      host B   rank 2   c           reduce   c + d   ─┘     ──────>     S       broadcast    S
               rank 3   d                                                                    S

With k hosts a leader sends 2 (k - 1)/k M over its host's link, however many ranks the host has; a
ring of all ranks sends nearly as much, in more messages. For many ranks on hosts with one link
each. Sums are in the order of ranks inside a host that has the backend "shoal"; from three hosts on
their bits depend on where in the tensor a number lies, as the ring's do.

Source: the hierarchical all-reduce of Horovod (Sergeev and Del Balso, arXiv:1802.05799), with one
leader a host; BytePS (Jiang et al., OSDI 2020) layers machines in the same way. The backend "shoal"
uses all ranks of a host for the links between hosts (comm/backend/hosts.py)."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from shoal.comm.algorithms import ring
from shoal.comm.algorithms.send_recv import PairwiseLink


def all_reduce(
    tensor: Tensor, inside: dist.ProcessGroup | None, leaders: PairwiseLink | None
) -> None:
    """`tensor` (1-D, contiguous) becomes the sum of all ranks', the same bits on each. Collective.

    Args:
        inside: the ranks of this host, its first one the leader; None where there is one alone.
        leaders: those of all hosts; None on ranks that are not.
    """
    if inside is not None:
        dist.reduce(tensor, group=inside, group_dst=0)  # [1]
    if leaders is not None:
        ring.all_reduce(tensor, leaders)  # [2]
    if inside is not None:
        dist.broadcast(tensor, group=inside, group_src=0)  # [3]
