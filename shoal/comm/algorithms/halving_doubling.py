"""All-reduce by recursive halving and doubling: with every message, the piece that a rank sums
halves; then it doubles again.

    Four ranks, a tensor of four pieces. A capital is the sum over all ranks.

                  rank 0        rank 1        rank 2        rank 3
                  a0 b0 c0 d0   a1 b1 c1 d1   a2 b2 c2 d2   a3 b3 c3 d3
    [1] halve     0 with 2, 1 with 3: each rank sends one half and sums the other
                  a02 b02       a13 b13       c02 d02       c13 d13
                  0 with 1, 2 with 3: the same with half as much
                  A             B             C             D
    [2] double    the same pairs in reverse order
                  A B           A B           C D           C D
                  A B C D       A B C D       A B C D       A B C D

Ranks beyond the largest power of two first send their tensors to a rank below it [0], and receive
the sums at the end [3].

2 log2(n) messages in sequence; each rank sends 2 (n - 1)/n M, as in a ring, and some send M more if
n is no power of two. It suits tensors of medium size. Every element is summed in the same pairs of
ranks at every position, and a sum of two does not depend on their order.

Source: Rabenseifner, Optimization of Collective Reduction Operations, ICCS 2004, LNCS 3036.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.comm.algorithms.send_recv import PairwiseLink


def all_reduce(tensor: Tensor, pairs: PairwiseLink) -> None:
    """Sum `tensor` (1-D, contiguous) over all ranks in place, with the same bits on each.
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
    """All-reduce among the first `ranks` ranks, a power of two.

    Args: arrived: a buffer as long as `tensor`, for received values.
    """
    summed = tensor
    distance = ranks // 2
    exchanges = []
    while distance:  # [1]
        partner = pairs.rank ^ distance
        middle = len(summed) // 2
        low, high = summed[:middle], summed[middle:]
        summed, sent = (low, high) if pairs.rank < partner else (high, low)
        pairs.exchange(sent, partner, arrived[: len(summed)], partner)
        summed += arrived[: len(summed)]
        exchanges.append((partner, summed, sent))
        distance //= 2
    for partner, summed, sent in reversed(exchanges):  # [2]
        pairs.exchange(summed, partner, sent, partner)
