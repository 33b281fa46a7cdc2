"""Means of gradients that are rounded to two bytes for each message.

      rank 0   a0 b0 c0   [1] all-to-all   a0 a1 a2   [2] mean   A   [3] all-gather   A B C
      rank 1   a1 b1 c1       ─────────>   b0 b1 b2   ──────>    B       ─────────>   A B C
      rank 2   a2 b2 c2       in 2 bytes   c0 c1 c2  in float32  C       in 2 bytes   A B C

A rank sends 2(n-1)/n of the elements, as in a ring, in half of float32's bytes. Each value is
rounded twice, for any number of ranks: a ring that adds in two bytes rounds at every hop, and an
all-gather of all messages sends n/2 times as much."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shoal.comm.compression import Compression
from shoal.comm.compression.reducers.base import BucketEntry
from shoal.comm.equal_chunks import all_gather, all_to_all
from shoal.platform.tensors import accumulation_dtype


class HalfPrecisionReducer:
    """Averages gradients that travel as bfloat16 or float16. Rounding errors are dropped.

    Args: compression: Bf16 or Fp16; Fp16 has one power of two for each rank's chunk of a bucket.
    """

    has_error_feedback = False

    def __init__(self, compression: Compression) -> None:
        self.compression = compression

    def mean(
        self, flat: Tensor, members: Sequence[BucketEntry], group: dist.ProcessGroup | None
    ) -> None:
        ranks = dist.get_world_size(group)
        dtype = flat.dtype
        chunks = F.pad(flat, (0, -len(flat) % ranks)).view(ranks, -1)
        count = chunks.shape[1]
        size_bytes = self.compression.size_bytes(count, dtype)
        messages = torch.empty(ranks, size_bytes, dtype=torch.uint8, device=flat.device)
        for chunk, out in zip(chunks, messages, strict=True):
            self.compression.encode(chunk, None, out)
        arrived = torch.empty_like(messages)
        all_to_all(arrived, messages, group)  # [1]
        total = torch.zeros(count, dtype=accumulation_dtype(dtype), device=flat.device)
        for message in arrived:  # [2]
            total += self.compression.decode(message, count, dtype)
        message = torch.empty(size_bytes, dtype=torch.uint8, device=flat.device)
        self.compression.encode((total / ranks).to(dtype), None, message)
        means = torch.empty(ranks * size_bytes, dtype=torch.uint8, device=flat.device)
        all_gather(means, message, group)  # [3]
        decoded = [self.compression.decode(mean, count, dtype) for mean in means.view(ranks, -1)]
        flat.copy_(torch.cat(decoded)[: len(flat)])

    def keep(self, names: Collection[str]) -> None:
        """Save nothing: there is no state."""

    def rank_state_dict(self) -> dict[str, Tensor]:
        return {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load nothing: there is no state."""

    def sent_bytes(self, members: Sequence[BucketEntry], dtype: torch.dtype, ranks: int) -> int:
        count = -(-sum(member.count for member in members) // ranks)
        return 2 * (ranks - 1) * self.compression.size_bytes(count, dtype)
