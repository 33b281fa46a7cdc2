"""Means of messages that must be decoded before they can be added: all-gather, then decode.

      gradient ──(+)──> encode ──> message ──> all-gather ──> decode n messages ──> mean
                ^          │                                                 in the order of ranks
                └─ memory <┘        the residual of this message, added to the next gradient

A rank sends its message n - 1 times, so its bytes grow with the number of ranks. An all-reduce that
adds on the way would have to compress again at every hop, with a new error."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.compression.base import BucketEntry, CompressedReducer, Compression
from shoal.comm.compression.error_feedback import ErrorFeedback
from shoal.comm.equal_chunks import all_gather
from shoal.platform.tensors import accumulation_dtype


class AllGatherReducer(CompressedReducer):
    """Averages messages with error feedback, one message for each parameter.

    Gradients of one layer have one scale, so each parameter is compressed alone. Residuals then do
    not depend on the layout of the buckets."""

    def __init__(self, compression: Compression) -> None:
        self.compression = compression
        self.memory = ErrorFeedback("left_out.")
        super().__init__(self.memory)

    def mean(
        self, flat: Tensor, members: Sequence[BucketEntry], group: dist.ProcessGroup | None
    ) -> None:
        ranks = dist.get_world_size(group)
        counts = [member.count for member in members]
        sizes_bytes = [self.compression.size_bytes(count, flat.dtype) for count in counts]
        message = torch.empty(sum(sizes_bytes), dtype=torch.uint8, device=flat.device)
        for member, gradient, out in zip(
            members, flat.split(counts), message.split(sizes_bytes), strict=True
        ):
            self.compression.encode(gradient, self._draft_residual(member.name, gradient), out)
        arrived = torch.empty(ranks * len(message), dtype=torch.uint8, device=flat.device)
        all_gather(arrived, message, group)
        total = torch.zeros(len(flat), dtype=accumulation_dtype(flat.dtype), device=flat.device)
        for rank_message in arrived.view(ranks, -1):
            pieces = rank_message.split(sizes_bytes)
            for sums, piece in zip(total.split(counts), pieces, strict=True):
                sums += self.compression.decode(piece, len(sums), flat.dtype)
        flat.copy_(total / ranks)
        self.finite = self.finite and bool(flat.isfinite().all())

    def _draft_residual(self, name: str, gradient: Tensor) -> Tensor:
        """Return a copy of the saved residual, because the step may be skipped; zeros at first."""
        residual = self.memory.saved.get(name)
        if residual is None:
            dtype = accumulation_dtype(gradient.dtype)
            residual = torch.zeros(len(gradient), dtype=dtype, device=gradient.device)
        self.memory.drafts[name] = residual.to(gradient.device, copy=True)
        return self.memory.drafts[name]
