"""The contract of a compression, and the layout of a message: flat tensors one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

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
