"""PowerSGD: the mean of the ranks' matrices as a product of two thin ones, found by a step of power
iteration.

              m                r              m
         ┌─────────┐         ┌──┐        ┌─────────┐
       n │    M    │   ~   n │P │   x  r │   Q^T   │        r (n + m) numbers for n m
         │         │         │  │        └─────────┘
         └─────────┘         └──┘

      [1] M = gradient + memory       P = M Q          mean of P over ranks      Q: of the step before
      [2] P's columns orthonormal     Q = M^T P        mean of Q over ranks
      [3] P Q^T arrives               memory = M - P Q^T

The mean is linear in M, so the two means of thin matrices are those of one machine that has the
mean of all M. From step to step Q turns towards the largest singular vectors. What is no matrix, or
would not get smaller, is sent as it is, beside P. The memory of one rank holds what it differs from
the others by as well; only the mean of all memories is what has not arrived.

Source: Vogels, Karimireddy and Jaggi, PowerSGD: Practical Low-Rank Gradient Compression for
Distributed Optimization, NeurIPS 2019, algorithms 1 and 2. Convolutions are n = output channels by
m = all else."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.buckets import apply_flattened
from shoal.comm.compression.reducers.base import BucketEntry, ErrorFeedback, uncompressed_bytes
from shoal.comm.deterministic import rank_order_mean
from shoal.platform.tensors import accumulation_dtype


@dataclass
class _LowRank:
    """A matrix in the middle of a step."""

    name: str
    arrives: Tensor  # (n, m), a view of the bucket
    whole: Tensor  # M, (n, m)
    p: Tensor  # (n, r)
    q: Tensor  # (m, r)


class PowerSgd:
    """Means of matrices of a given rank, with error feedback and a warm start.

    Args: rank: r, at least 1.
    """

    has_error_feedback = True

    def __init__(self, rank: int) -> None:
        self.rank, self.finite = rank, True
        self.memory, self.guesses = ErrorFeedback("left_out."), ErrorFeedback("guess.")

    def mean(
        self, flat: Tensor, members: Sequence[BucketEntry], group: dist.ProcessGroup | None
    ) -> None:
        pieces = flat.split([member.count for member in members])
        both = list(zip(members, pieces, strict=True))
        plain = [piece for member, piece in both if not self._gets_smaller(member.shape)]
        thin = [
            self._begin(member, piece) for member, piece in both if self._gets_smaller(member.shape)
        ]
        dtype = accumulation_dtype(flat.dtype)
        sent = [*(matrix.p for matrix in thin), *(piece.to(dtype) for piece in plain)]
        means = _means(sent, group)  # [1]
        for matrix, p in zip(thin, means[: len(thin)], strict=True):
            matrix.p = (
                torch.linalg.qr(p).Q if bool(p.isfinite().all()) else p
            )  # LAPACK takes no NaN
        for piece, mean in zip(plain, means[len(thin) :], strict=True):
            piece.copy_(mean)
        for matrix, q in zip(
            thin, _means([matrix.whole.T @ matrix.p for matrix in thin], group), strict=True
        ):  # [2]
            matrix.q = q
            self._end(matrix)  # [3]
        self.finite = self.finite and bool(flat.isfinite().all())

    def _begin(self, member: BucketEntry, piece: Tensor) -> _LowRank:
        arrives, dtype = piece.view(member.shape[0], -1), accumulation_dtype(piece.dtype)
        waits, guess = self.memory.kept.get(member.name), self.guesses.kept.get(member.name)
        whole = arrives.to(dtype, copy=True)
        if waits is not None:
            whole += waits.to(whole.device).view_as(whole)
        if guess is None:
            # From the name, so that it is the same on all ranks and in every run.
            draws = torch.Generator().manual_seed(zlib.crc32(member.name.encode()))
            guess = torch.randn(whole.shape[1], self.rank, generator=draws, dtype=torch.float64)
        q = guess.to(whole.device, dtype)
        return _LowRank(member.name, arrives, whole, whole @ q, q)

    def _end(self, matrix: _LowRank) -> None:
        found = matrix.p @ matrix.q.T
        matrix.arrives.copy_(found)
        self.memory.drafts[matrix.name] = (matrix.whole - matrix.arrives).flatten()
        self.guesses.drafts[matrix.name] = matrix.q

    def keep(self, names: Collection[str]) -> None:
        for memory in (self.memory, self.guesses):
            memory.keep(names if self.finite else ())
        self.finite = True

    def rank_state_dict(self) -> dict[str, Tensor]:
        return self.memory.rank_state_dict() | self.guesses.rank_state_dict()

    def load(self, found: Mapping[str, Tensor]) -> None:
        self.memory.load(found)
        self.guesses.load(
            {n: q for n, q in found.items() if q.dim() == 2 and q.shape[1] == self.rank}
        )

    def sent_bytes(self, members: Sequence[BucketEntry], dtype: torch.dtype, ranks: int) -> int:
        thin = [member for member in members if self._gets_smaller(member.shape)]
        rows = sum(member.shape[0] for member in thin)
        columns = sum(member.count // member.shape[0] for member in thin)
        plain = sum(member.count for member in members) - sum(member.count for member in thin)
        counts = (self.rank * rows + plain, self.rank * columns)
        return sum(uncompressed_bytes(count, accumulation_dtype(dtype), ranks) for count in counts)

    def _gets_smaller(self, shape: torch.Size) -> bool:
        if len(shape) < 2 or shape.numel() == 0:
            return False
        rows, columns = shape[0], shape.numel() // shape[0]
        return self.rank * (rows + columns) < rows * columns


def _means(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Means over ranks, sent as one. Collective, unless there are none."""
    if not tensors:
        return []
    return apply_flattened(lambda flat: rank_order_mean(flat, group), tensors)
