"""All-reduce in a ring: every rank talks to its two neighbours only, and every link is busy all the
time.

The tensor is cut into as many pieces as there are ranks; each piece goes round the ring twice.
Three ranks:

                  rank 0            rank 1            rank 2
                  a0  b0  c0        a1  b1  c1        a2  b2  c2
    [1] scatter   a0 ───────────>   b1 ───────────>   c2 ───────────>     (rank 2's right neighbour is rank 0)
        and       a0  b0  c20       a01 b1  c1        a2  b12 c2
        reduce    c20 ──────────>   a01 ──────────>   b12 ──────────>
                  a0  B   c20       a01 b1  C         A   b12 c2          a capital is the sum of all ranks
    [2] gather    B ────────────>   C ────────────>   A ────────────>
        all       A   B   c20       a01 B   C         A   b12 C
                  A ────────────>   B ────────────>   C ────────────>
                  A   B   C         A   B   C         A   B   C

2 (n - 1) messages of M/n bytes one after the other; each rank sends 2 (n - 1)/n M, and no algorithm
does with less.
So it is the one for large tensors. Piece i is summed from rank i on around the ring: from three
ranks on, the bits of a sum depend on where in the tensor a number lies.

Source: Patarasuk and Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations,
JPDC 69(2), 2009."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.comm.algorithms.send_recv import PairwiseLink


def all_reduce(tensor: Tensor, pairs: PairwiseLink) -> None:
    """`tensor` (1-D, contiguous) becomes the sum of all ranks', the same bits on each.
    Collective.
    """
    rank, size = pairs.rank, pairs.size
    left, right = (rank - 1) % size, (rank + 1) % size
    pieces = tensor.tensor_split(size)
    arrived = torch.empty_like(pieces[0])  # the longest
    for step in range(size - 1):  # [1]
        outgoing, growing = pieces[(rank - step) % size], pieces[(rank - step - 1) % size]
        pairs.exchange(outgoing, right, arrived[: len(growing)], left)
        growing += arrived[: len(growing)]
    for step in range(size - 1):  # [2]
        pairs.exchange(pieces[(rank - step + 1) % size], right, pieces[(rank - step) % size], left)
