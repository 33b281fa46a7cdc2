"""All-reduce on a binomial tree: sums go up to rank 0, and the total comes down on the same edges.

    rank        0     1     2     3     4     5           six ranks
    [1] up      <──── 1     <──── 3     <──── 5           a rank sends once in this phase
                <────────── 23
                <────────────────────── 45
    [2] down    ──────────────────────> A                 the same edges in reverse order
                ──────────> A
                ────> A     ────> A     ────> A

2 log2(n) messages in sequence, rounded up, each of all M bytes: few messages, so the tree suits
small tensors. Rank 0 sends and receives log2(n) M. Every element is summed in the same pairs of
ranks, at every position in the tensor.

Source: the binomial tree of Thakur, Rabenseifner and Gropp, Optimization of Collective
Communication Operations in MPICH, IJHPCA 19(1), 2005. Two trees at once use all links (Sanders,
Speck and Träff, Two-tree algorithms for full bandwidth broadcast, reduction and scan, Parallel
Computing 35(12), 2009); this is one."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.comm.algorithms.send_recv import PairwiseLink


def all_reduce(tensor: Tensor, pairs: PairwiseLink) -> None:
    """Sum `tensor` (1-D, contiguous) over all ranks in place, with the same bits on each.
    Collective.
    """
    rank, size = pairs.rank, pairs.size
    arrived = torch.empty_like(tensor)
    distance = 1
    while distance < size and not rank & distance:  # [1]
        if rank + distance < size:
            pairs.receive(arrived, rank + distance)
            tensor += arrived
        distance *= 2
    if rank:
        pairs.send(tensor, rank - distance)
        pairs.receive(tensor, rank - distance)  # [2]
    while distance > 1:
        distance //= 2
        if rank + distance < size:
            pairs.send(tensor, rank + distance)
