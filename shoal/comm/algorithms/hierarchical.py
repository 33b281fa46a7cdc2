"""All-reduce in two layers: shared memory inside each host, and a ring of one leader for each host.

      host A   rank 0   a       [1] inside   a + b   ─┐  [2] a ring     S       [3] inside   S
               rank 1   b           ──────>            │     of leaders             ──────>   S
      host B   rank 2   c           reduce   c + d   ─┘     ──────>     S       broadcast    S
               rank 3   d                                                                    S

With k hosts a leader sends 2 (k - 1)/k M over its host's link, for any number of ranks on the host;
a ring of all ranks sends nearly as much, in more messages. This suits many ranks on hosts with one
link each. Inside a host with the backend "shoal", sums are in the order of ranks. From three hosts
on, their bits depend on the position in the tensor, as in a ring.

Source: the hierarchical all-reduce of Horovod (Sergeev and Del Balso, arXiv:1802.05799), with one
leader a host; BytePS (Jiang et al., OSDI 2020) layers machines in the same way. The backend "shoal"
itself uses all ranks of a host between hosts (shm_backend/inter_host.py)."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from shoal.comm.algorithms import ring
from shoal.comm.algorithms.send_recv import PairwiseLink


def all_reduce(
    tensor: Tensor, host_group: dist.ProcessGroup | None, leaders: PairwiseLink | None
) -> None:
    """Sum `tensor` (1-D, contiguous) over all ranks in place, with the same bits on each.
    Collective.

    Args:
        host_group: the ranks of this host, the first of which is the leader; None for one rank.
        leaders: the leaders of all hosts; None on other ranks.
    """
    if host_group is not None:
        dist.reduce(tensor, group=host_group, group_dst=0)  # [1]
    if leaders is not None:
        ring.all_reduce(tensor, leaders)  # [2]
    if host_group is not None:
        dist.broadcast(tensor, group=host_group, group_src=0)  # [3]
