"""Means over ranks of compressed gradients, with error feedback: what a message leaves out is added
to the next gradient of the same parameter.

gradient ──(+)──> encode ──> message
          ^          │
          └─ memory <┘    the residual
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.compression.base import BucketEntry, Compression
from shoal.comm.equal_chunks import all_gather
from shoal.platform.tensors import accumulation_dtype


class CompressedReducer(ABC):
    """Approximate means over ranks. One object holds the state of one rank.

    In every step `mean` is called for each bucket, in the same order on all ranks, and then `keep`
    is called once.

    Attributes:
        prefixes: what the names of its state begin with, as `left_out.`, before that of a
            parameter; none without error feedback.
        finite: all means of this step are finite.
        saved: what the last step leaves for the next: prefix -> parameter -> tensor.
        drafts: that of this step, which a skipped step drops.
    """

    prefixes: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self.finite = True
        self.saved: dict[str, dict[str, Tensor]] = {prefix: {} for prefix in self.prefixes}
        self.drafts: dict[str, dict[str, Tensor]] = {prefix: {} for prefix in self.prefixes}

    @abstractmethod
    def mean(
        self, flat: Tensor, members: Sequence[BucketEntry], group: dist.ProcessGroup | None
    ) -> None:
        """Average `flat` over ranks in place, with the same bits on every rank. Collective.

        Args:
            flat: the gradients of `members` one after the other, of shape (sum of counts,).
            members: the parameters of the bucket.
            group: None for the default group.
        """

    def keep(self, names: Collection[str]) -> None:
        """End a step: save the drafts of these parameters for the next step.

        The other parameters were used on no rank, so their residuals stay as they were. If any mean
        of the step is not finite, the step is skipped, and no residual changes."""
        for prefix, drafts in self.drafts.items():
            kept = {name: draft for name, draft in drafts.items() if name in names and self.finite}
            self.saved[prefix] |= kept
            drafts.clear()
        self.finite = True

    def rank_state_dict(self) -> dict[str, Tensor]:
        """Return the state of this rank for a checkpoint."""
        return {f"{p}{name}": value for p in self.saved for name, value in self.saved[p].items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load a `rank_state_dict`. Entries of other owners are ignored, and ours may be absent."""
        for prefix in self.prefixes:
            self.drafts[prefix].clear()
            self.saved[prefix] = {
                name.removeprefix(prefix): value.clone()
                for name, value in state.items()
                if name.startswith(prefix)
            }


class AllGatherReducer(CompressedReducer):
    """Averages messages with error feedback, one message for each parameter.

    Messages that must be decoded before they can be added go to all ranks, which decode all n and
    add in the order of ranks. A rank sends its message n - 1 times, so its bytes grow with the
    number of ranks. An all-reduce that adds on the way would have to compress again at every hop,
    with a new error.

    Gradients of one layer have one scale, so each parameter is compressed alone. Residuals then do
    not depend on the layout of the buckets."""

    prefixes = ("left_out.",)

    def __init__(self, compression: Compression) -> None:
        super().__init__()
        self.compression = compression

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
        residual = self.saved["left_out."].get(name)
        if residual is None:
            residual = torch.zeros_like(gradient, dtype=accumulation_dtype(gradient.dtype))
        draft = residual.to(gradient.device, copy=True)
        self.drafts["left_out."][name] = draft
        return draft
