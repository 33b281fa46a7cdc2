"""All-reduce by halving and doubling: with every message the piece that a rank sums halves, and
then it doubles again.

                  rank 0        rank 1        rank 2        rank 3        four ranks, a tensor of four pieces
                  a0 b0 c0 d0   a1 b1 c1 d1   a2 b2 c2 d2   a3 b3 c3 d3
    [1] halve     0 with 2, 1 with 3: each gives the half that it does not keep
                  a02 b02       a13 b13       c02 d02       c13 d13
                  0 with 1, 2 with 3: the same with half as much
                  A             B             C             D             a capital is the sum of all ranks
    [2] double    the same messages backwards
                  A B           A B           C D           C D
                  A B C D       A B C D       A B C D       A B C D

Ranks beyond the largest power of two first give their numbers to one below it [0], and get the sums
at the end [3].

2 log2(n) messages one after the other; each rank sends 2 (n - 1)/n M, as in a ring, and M more
where n is no power of two. It is the one for middling tensors. Every number is summed in the same
pairs of ranks, wherever in the tensor it
lies: a sum of two does not depend on their order.

Source: Rabenseifner, Optimization of Collective Reduction Operations, ICCS 2004, LNCS 3036.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.comm.algorithms.send_recv import PairwiseLink


def all_reduce(tensor: Tensor, pairs: PairwiseLink) -> None:
    """`tensor` (1-D, contiguous) becomes the sum of all ranks', the same bits on each.
    Collective.
    """
    rank, power = pairs.rank, 1 << (pairs.size.bit_length() - 1)
    if rank >= power:
        pairs.send(tensor, rank - power)  # [0]
        pairs.receive(tensor, rank - power)  # [3]
        return
    arrived = torch.empty_like(tensor)
    guest = rank + power if rank + power < pairs.size else None
    if guest is not None:
        pairs.receive(arrived, guest)  # [0]
        tensor += arrived
    _halve_and_double(tensor, arrived, pairs, power)
    if guest is not None:
        pairs.send(tensor, guest)  # [3]


def _halve_and_double(tensor: Tensor, arrived: Tensor, pairs: PairwiseLink, ranks: int) -> None:
    """Among the first `ranks`, a power of two. Args: arrived: as long as `tensor`, for what
    comes in.
    """
    mine, distance = tensor, ranks // 2
    way_back = []
    while distance:  # [1]
        partner = pairs.rank ^ distance
        middle = len(mine) // 2
        low, high = mine[:middle], mine[middle:]
        mine, given = (low, high) if pairs.rank < partner else (high, low)
        pairs.exchange(given, partner, arrived[: len(mine)], partner)
        mine += arrived[: len(mine)]
        way_back.append((partner, mine, given))
        distance //= 2
    for partner, mine, given in reversed(way_back):  # [2]
        pairs.exchange(mine, partner, given, partner)
