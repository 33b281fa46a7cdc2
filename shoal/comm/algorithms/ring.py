"""All-reduce in a ring: every rank sends to its right neighbour only, and all links stay busy.

The tensor has as many pieces as there are ranks, and each piece goes round the ring twice. Three
ranks; the right neighbour of rank 2 is rank 0, and a capital is the sum over all ranks:

                  rank 0            rank 1            rank 2
                  a0  b0  c0        a1  b1  c1        a2  b2  c2
    [1] reduce-   a0 ───────────>   b1 ───────────>   c2 ───────────>
        scatter   a0  b0  c20       a01 b1  c1        a2  b12 c2
                  c20 ──────────>   a01 ──────────>   b12 ──────────>
                  a0  B   c20       a01 b1  C         A   b12 c2
    [2] all-      B ────────────>   C ────────────>   A ────────────>
        gather    A   B   c20       a01 B   C         A   b12 C
                  A ────────────>   B ────────────>   C ────────────>
                  A   B   C         A   B   C         A   B   C

2 (n - 1) messages of M/n bytes in sequence; each rank sends 2 (n - 1)/n M, the least possible, so
the ring suits large tensors. Piece i is summed from rank i on around the ring: from three ranks on,
the bits of a sum depend on the element's position in the tensor.

Source: Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations,
JPDC 69(2), 2009."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.comm.algorithms.send_recv import PairwiseLink


def all_reduce(tensor: Tensor, pairs: PairwiseLink) -> None:
    """Sum `tensor` (1-D, contiguous) over all ranks in place, with the same bits on each.
    Collective.
    """
    rank, size = pairs.rank, pairs.size
    left, right = (rank - 1) % size, (rank + 1) % size
    pieces = tensor.tensor_split(size)
    arrived = torch.empty_like(pieces[0])  # the longest piece
    for step in range(size - 1):  # [1]
        sent = pieces[(rank - step) % size]
        partial_sum = pieces[(rank - step - 1) % size]
        pairs.exchange(sent, right, arrived[: len(partial_sum)], left)
        partial_sum += arrived[: len(partial_sum)]
    for step in range(size - 1):  # [2]
        pairs.exchange(pieces[(rank - step + 1) % size], right, pieces[(rank - step) % size], left)
