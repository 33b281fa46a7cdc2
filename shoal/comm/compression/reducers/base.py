"""What every reduction offers, and the memory of what was left out."""

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
    """Means over ranks, roughly. One object holds what one rank keeps from step to step.

    In every step `mean` is called for each bucket, in the same order on all ranks, then `keep`
    once."""

    @property
    def has_error_feedback(self) -> bool:
        """Whether anything is kept from step to step."""

    def mean(
        self, flat: Tensor, members: Sequence[BucketEntry], group: dist.ProcessGroup | None
    ) -> None:
        """Put the mean over ranks in the place of `flat`, the same bits on every rank. Collective.

        Args: flat: the gradients of `members` one after the other, (sum of counts,).
        """

    def keep(self, names: Collection[str]) -> None:
        """The step is through: of these parameters what was left out waits from now on for the next
        one.

        Of others nothing arrived anywhere, so nothing has changed. Where any mean of the step was
        not finite, the step is worth nothing, and no parameter's memory changes."""

    def rank_state_dict(self) -> dict[str, Tensor]:
        """What this rank keeps, for a checkpoint."""

    def load(self, found: Mapping[str, Tensor]) -> None:
        """The inverse of `private`; `found` may hold other things as well, and nothing of ours."""

    def sent_bytes(self, members: Sequence[BucketEntry], dtype: torch.dtype, ranks: int) -> int:
        """What one rank sends for a bucket in one step."""


class ErrorFeedback:
    """One tensor a parameter, drafted in the middle of a step and kept at its end.

    Args: prefix: of its names in a checkpoint.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.kept: dict[str, Tensor] = {}
        self.drafts: dict[str, Tensor] = {}

    def keep(self, names: Collection[str]) -> None:
        """Drafts of these become what is kept; all others are dropped."""
        self.kept |= {name: draft for name, draft in self.drafts.items() if name in names}
        self.drafts.clear()

    def rank_state_dict(self) -> dict[str, Tensor]:
        return {self.prefix + name: value for name, value in self.kept.items()}

    def load(self, found: Mapping[str, Tensor]) -> None:
        self.drafts.clear()
        self.kept = {
            n.removeprefix(self.prefix): v.clone()
            for n, v in found.items()
            if n.startswith(self.prefix)
        }


def uncompressed_bytes(count: int, dtype: torch.dtype, ranks: int) -> int:
    """What one rank sends for the mean of `count` numbers, as they are: by `ordered_mean`, or a
    ring.
    """
    return 2 * (ranks - 1) * -(-count // ranks) * dtype.itemsize
