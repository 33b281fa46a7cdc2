"""The contract of compressed reducers, and the error feedback that several of them have."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class BucketEntry:
    """A parameter whose gradient is part of a bucket."""

    name: str
    shape: torch.Size

    @property
    def count(self) -> int:
        return self.shape.numel()


class CompressedReducer(Protocol):
    """Approximate means over ranks. One object holds the state of one rank.

    In every step `mean` is called for each bucket, in the same order on all ranks, and then `keep`
    is called once."""

    @property
    def has_error_feedback(self) -> bool:
        """True if the reducer has state from step to step."""

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
        """End a step: save the residuals of these parameters for the next step.

        The other parameters were used on no rank, so their residuals stay as they were. If any mean
        of the step is not finite, the step is skipped, and no residual changes."""

    def rank_state_dict(self) -> dict[str, Tensor]:
        """Return the state of this rank for a checkpoint."""

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load a `rank_state_dict`. Entries of other owners are ignored, and ours may be absent."""

    def sent_bytes(self, members: Sequence[BucketEntry], dtype: torch.dtype, ranks: int) -> int:
        """Return the bytes that one rank sends for a bucket in one step."""


class ErrorFeedback:
    """One residual for each parameter: a draft during a step, and saved at its end.

    Args: prefix: of the names in a checkpoint.

    Attributes:
        saved: the tensors of the last step, by parameter name.
        drafts: those of this step, which a skipped step drops.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.saved: dict[str, Tensor] = {}
        self.drafts: dict[str, Tensor] = {}

    def keep(self, names: Collection[str]) -> None:
        """Save the drafts of these parameters, and drop all others."""
        self.saved |= {name: draft for name, draft in self.drafts.items() if name in names}
        self.drafts.clear()

    def rank_state_dict(self) -> dict[str, Tensor]:
        return {self.prefix + name: value for name, value in self.saved.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.drafts.clear()
        self.saved = {
            name.removeprefix(self.prefix): value.clone()
            for name, value in state.items()
            if name.startswith(self.prefix)
        }


def uncompressed_bytes(count: int, dtype: torch.dtype, ranks: int) -> int:
    """Return the bytes that one rank sends for an uncompressed mean of `count` elements, at most.

    `rank_order_mean` and a ring send the same. Some ranks send a few elements less where `count` is
    no multiple of the number of ranks.
    """
    return 2 * (ranks - 1) * -(-count // ranks) * dtype.itemsize
