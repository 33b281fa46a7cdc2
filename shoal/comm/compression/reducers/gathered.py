"""Every rank gets every rank's message: for messages that nobody can add up without reading them.

      gradient ──(+)──> encode ──> message ──> all-gather ──> decode n messages ──> mean, in the order of ranks
                ^          │
                └─ memory <┘        what this rank's message left out waits here for its next one

A rank sends its message n - 1 times: with ever more ranks, ever more. An all-reduce that adds up on
the way would have to leave something out again at every hop."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.compression import Compression
from shoal.comm.compression.reducers.base import BucketEntry, ErrorFeedback
from shoal.comm.equal_chunks import all_gather
from shoal.platform.tensors import accumulation_dtype


class AllGatherReducer:
    """Means of messages with error feedback, a message for each parameter.

    By parameter, for numbers of one layer are of one scale, and what waits does not depend on how
    parameters are put together in buckets."""

    has_error_feedback = True

    def __init__(self, compression: Compression) -> None:
        self.compression, self.memory, self.finite = compression, ErrorFeedback("left_out."), True

    def mean(
        self, flat: Tensor, members: Sequence[BucketEntry], group: dist.ProcessGroup | None
    ) -> None:
        ranks, counts = dist.get_world_size(group), [member.count for member in members]
        sizes_bytes = self._sizes_bytes(members, flat.dtype)
        message = torch.empty(sum(sizes_bytes), dtype=torch.uint8, device=flat.device)
        for member, gradient, out in zip(
            members, flat.split(counts), message.split(sizes_bytes), strict=True
        ):
            self.compression.encode(gradient, self._with_residual(member.name, gradient), out)
        arrived = torch.empty(ranks * len(message), dtype=torch.uint8, device=flat.device)
        all_gather(arrived, message, group)
        total = torch.zeros(len(flat), dtype=accumulation_dtype(flat.dtype), device=flat.device)
        for one in arrived.view(ranks, -1):
            for part, piece in zip(total.split(counts), one.split(sizes_bytes), strict=True):
                part += self.compression.decode(piece, len(part), flat.dtype)
        flat.copy_(total / ranks)
        self.finite = self.finite and bool(flat.isfinite().all())

    def keep(self, names: Collection[str]) -> None:
        self.memory.keep(names if self.finite else ())
        self.finite = True

    def rank_state_dict(self) -> dict[str, Tensor]:
        return self.memory.rank_state_dict()

    def load(self, found: Mapping[str, Tensor]) -> None:
        self.memory.load(found)

    def sent_bytes(self, members: Sequence[BucketEntry], dtype: torch.dtype, ranks: int) -> int:
        return (ranks - 1) * sum(self._sizes_bytes(members, dtype))

    def _sizes_bytes(self, members: Sequence[BucketEntry], dtype: torch.dtype) -> list[int]:
        return [self.compression.size_bytes(member.count, dtype) for member in members]

    def _with_residual(self, name: str, gradient: Tensor) -> Tensor:
        """A copy of what waits: the step may come to nothing."""
        known = self.memory.kept.get(name)
        if known is None:
            known = torch.zeros(
                len(gradient), dtype=accumulation_dtype(gradient.dtype), device=gradient.device
            )
        self.memory.drafts[name] = known.to(gradient.device, copy=True)
        return self.memory.drafts[name]
