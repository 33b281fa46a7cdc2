"""The contracts of a compression and of means over ranks of what was compressed, and the layout of
a message: flat tensors one after the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.compression.error_feedback import ErrorFeedback
from shoal.errors import UsageError


class Compression(Protocol):
    """Encodes gradients as messages of a fixed size, and decodes them.

    The methods are pure: they send nothing, and the caller owns all state. A gradient is flat, of
    shape (count,), in float64, float32, bfloat16 or float16. If it is not finite (an element is NaN
    or infinite), the decoded gradient is not finite either, so that the optimizer can skip the
    step. The same gradients give the same bits, with any number of threads."""

    keeps_error: ClassVar[bool]
    """True for error feedback: what a message leaves out is added to the next gradient."""

    def size_bytes(self, count: int, dtype: torch.dtype) -> int:
        """Return the bytes of a message for `count` elements of `dtype`.

        Sender and receiver both compute the size, so messages do not contain it.
        """

    def encode(self, gradient: Tensor, memory: Tensor | None, out: Tensor) -> None:
        """Write the message for `gradient` and `memory` into `out`, and the residual into `memory`.

        Args:
            gradient: (count,); not changed.
            memory: (count,), zeros at first, then the same tensor in every step. Its values are
                added to `gradient`. Its dtype is the gradient's or a wider one. None if
                `keeps_error` is False. It stays unchanged if the message is not finite, because
                that step is skipped.
            out: (size_bytes,) of uint8, with any alignment.
        """

    def decode(self, message: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Decode a message into a new gradient of shape (count,) and `dtype`.

        Args:
            message: (size_bytes,) of uint8, with any alignment.
            count, dtype: of the encoded gradient.

        Raises: UsageError: the message is damaged, or was encoded with other arguments, as far as
            its bytes show it.
        """


@dataclass(frozen=True)
class BucketEntry:
    """A parameter whose gradient is part of a bucket."""

    name: str
    shape: torch.Size

    @property
    def count(self) -> int:
        return self.shape.numel()


class CompressedReducer(ABC):
    """Approximate means over ranks. One object holds the state of one rank.

    In every step `mean` is called for each bucket, in the same order on all ranks, and then `keep`
    is called once.

    Args: memories: what one step leaves for the next; none without error feedback.

    Attributes: finite: all means of this step are finite.
    """

    def __init__(self, *memories: ErrorFeedback) -> None:
        self._memories = memories
        self.finite = True

    @property
    def has_error_feedback(self) -> bool:
        """True if the reducer has state from step to step."""
        return bool(self._memories)

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
        """End a step: save the residuals of these parameters for the next step.

        The other parameters were used on no rank, so their residuals stay as they were. If any mean
        of the step is not finite, the step is skipped, and no residual changes."""
        for memory in self._memories:
            memory.keep(names if self.finite else ())
        self.finite = True

    def rank_state_dict(self) -> dict[str, Tensor]:
        """Return the state of this rank for a checkpoint."""
        return {
            name: value
            for memory in self._memories
            for name, value in memory.rank_state_dict().items()
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load a `rank_state_dict`. Entries of other owners are ignored, and ours may be absent."""
        for memory in self._memories:
            memory.load(state)


def write(out: Tensor, *pieces: Tensor) -> None:
    """Write flat `pieces` one after the other into `out` (uint8)."""
    sizes_bytes = [piece.numel() * piece.itemsize for piece in pieces]
    assert out.dtype == torch.uint8, f"a message is bytes, not {out.dtype}"
    assert out.shape == (sum(sizes_bytes),), f"{tuple(out.shape)} for {sum(sizes_bytes)} bytes"
    for target, piece in zip(out.split(sizes_bytes), pieces, strict=True):
        target.copy_(piece.view(torch.uint8))


def read(message: Tensor, *layout: tuple[torch.dtype, int]) -> list[Tensor]:
    """Return copies of the pieces of a message.

    Args: layout: dtype and length of each piece.

    Raises: UsageError: the message has another size.
    """
    sizes_bytes = [count * dtype.itemsize for dtype, count in layout]
    if message.dtype != torch.uint8 or message.shape != (sum(sizes_bytes),):
        raise UsageError(
            f"a message of {message.numel():,} numbers of {message.dtype} was to be "
            f"{sum(sizes_bytes):,} bytes. Both ends must use the same compression, count and dtype."
        )
    pieces = zip(message.split(sizes_bytes), layout, strict=True)
    # Copies, because torch views bytes as another dtype only at that dtype's alignment, and a
    # message has any alignment.
    return [piece.clone().view(dtype) for piece, (dtype, _) in pieces]
