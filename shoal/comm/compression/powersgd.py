"""PowerSGD: the mean of a gradient matrix as a product of two thin matrices, by one step of power
iteration.

              m                r              m
         ┌─────────┐         ┌──┐        ┌─────────┐
       n │    M    │   ~   n │P │   x  r │   Q^T   │        r (n + m) numbers for n m
         │         │         │  │        └─────────┘
         └─────────┘         └──┘

      [1] M = gradient + memory       P = M Q          mean of P over ranks
      [2] P's columns orthonormal     Q = M^T P        mean of Q over ranks, for the next step too
      [3] the result is P Q^T         memory = M - P Q^T

P and Q are linear in M, so their means over ranks are those of one machine that has the mean of all
M. From step to step, Q turns towards the largest singular vectors. Vectors, and matrices that would
not get smaller, are sent uncompressed in the message of P. The memory of one rank also holds its
difference from the other ranks; only the mean of all memories is the error of the result.

Source: Vogels, Karimireddy and Jaggi, PowerSGD: Practical Low-Rank Gradient Compression for
Distributed Optimization, NeurIPS 2019, algorithms 1 and 2. Convolutions are n = output channels by
m = all else."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.compression.base import BucketEntry
from shoal.comm.compression.error_feedback import CompressedReducer
from shoal.comm.deterministic import rank_order_mean
from shoal.platform.tensors import accumulation_dtype, flatten_tensors, unflatten_tensors


@dataclass
class _LowRank:
    """A matrix during a step."""

    name: str
    gradient: Tensor  # (n, m), a view of the bucket; the result is written here
    m: Tensor  # M, (n, m)
    p: Tensor  # (n, r)


class PowerSgd(CompressedReducer):
    """Averages gradients as matrices of a given rank, with error feedback and a warm start.

    Args: rank: r, at least 1.
    """

    prefixes = ("left_out.", "guess.")  # the memory, and Q of the last step

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def mean(
        self, flat: Tensor, members: Sequence[BucketEntry], group: dist.ProcessGroup | None
    ) -> None:
        pieces = flat.split([member.count for member in members])
        matrices: list[_LowRank] = []
        plain: list[Tensor] = []
        for member, piece in zip(members, pieces, strict=True):
            if self._gets_smaller(member.shape):
                matrices.append(self._compute_p(member, piece))
            else:
                plain.append(piece)
        dtype = accumulation_dtype(flat.dtype)
        sent = [*(matrix.p for matrix in matrices), *(piece.to(dtype) for piece in plain)]
        means = _means(sent, group)  # [1]
        for piece, mean in zip(plain, means[len(matrices) :], strict=True):
            piece.copy_(mean)
        for matrix, p in zip(matrices, means[: len(matrices)], strict=True):
            # LAPACK refuses NaN. The result is not finite then, and the step is skipped.
            matrix.p = torch.linalg.qr(p).Q if bool(p.isfinite().all()) else p
        q_means = _means([matrix.m.T @ matrix.p for matrix in matrices], group)  # [2]
        for matrix, q in zip(matrices, q_means, strict=True):
            matrix.gradient.copy_(matrix.p @ q.T)  # [3]
            # The bucket may have a narrower dtype; the residual includes that rounding.
            self.drafts["left_out."][matrix.name] = (matrix.m - matrix.gradient).flatten()
            self.drafts["guess."][matrix.name] = q
        self.finite = self.finite and bool(flat.isfinite().all())

    def _compute_p(self, member: BucketEntry, piece: Tensor) -> _LowRank:
        """Start the step of one matrix, with P = M Q."""
        gradient = piece.view(member.shape[0], -1)
        dtype = accumulation_dtype(piece.dtype)
        m = gradient.to(dtype, copy=True)
        residual = self.saved["left_out."].get(member.name)
        if residual is not None:
            m += residual.to(m.device).view_as(m)
        guess = self.saved["guess."].get(member.name)
        if guess is None:
            # The seed is the name, so that Q is the same on all ranks and in every run.
            generator = torch.Generator().manual_seed(zlib.crc32(member.name.encode()))
            guess = torch.randn(m.shape[1], self.rank, generator=generator, dtype=torch.float64)
        return _LowRank(member.name, gradient, m, m @ guess.to(m.device, dtype))

    def load(self, state: Mapping[str, Tensor]) -> None:
        super().load(state)
        # A guess of another rank does not fit: the run may resume with another `powersgd=R`.
        guesses = self.saved["guess."].items()
        self.saved["guess."] = {name: q for name, q in guesses if q.shape[1] == self.rank}

    def _gets_smaller(self, shape: torch.Size) -> bool:
        """Return True if P and Q have fewer elements than a parameter of this shape."""
        if len(shape) < 2 or shape.numel() == 0:
            return False
        rows, columns = shape[0], shape.numel() // shape[0]
        return self.rank * (rows + columns) < rows * columns


def _means(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Average tensors over ranks in one message. Collective, unless there are no tensors."""
    if not tensors:
        return []
    return unflatten_tensors(rank_order_mean(flatten_tensors(tensors), group), tensors)
