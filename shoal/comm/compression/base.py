"""What every compression offers, and how a message is laid out: tensors one after the other,
byte for byte.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch
from torch import Tensor

from shoal.errors import UsageError


class Compression(Protocol):
    """Gradients to messages of a fixed size, and back. Pure: nothing is sent here, and all state is
    the caller's.

    A gradient is flat, of shape (count,), in float64, float32, bfloat16 or float16. If it is not
    finite (some number is NaN or infinite), then what arrives is not finite either, so that whoever
    steps can refuse it. The same gradients give the same bits, with any number of threads."""

    keeps_error: ClassVar[bool]
    """Whether what a message leaves out is kept in a memory and sent later."""

    def size_bytes(self, count: int, dtype: torch.dtype) -> int:
        """The bytes of every message for `count` numbers of `dtype`. Both ends compute it; no
        message tells it.
        """

    def encode(self, gradient: Tensor, memory: Tensor | None, out: Tensor) -> None:
        """Write the message for `gradient` into `out`, and into `memory` what the message leaves
        out.

        Args: gradient: (count,); not changed. memory: (count,), zeros at first, then the same
            tensor in every step: what it holds is added to `gradient`.
                Its dtype is the gradient's or a wider one. None if `keeps_error` is false. A
                message that is not finite leaves it as it was, for that step is refused.
            out: (size_bytes,) of uint8, anywhere in memory.
        """

    def decode(self, message: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """The gradient that `message` tells of, (count,) of `dtype`, in memory of its own.

        Args:
            message: (size_bytes,) of uint8, anywhere in memory.
            count, dtype: of the gradient that was encoded.

        Raises: UsageError: bytes that no `encode` for `count` numbers of `dtype` wrote, as far as
        that can be seen."""


def add_residual(gradient: Tensor, memory: Tensor | None) -> Tensor:
    """What is to be sent: the gradient and all that earlier messages left out, in the dtype of
    `memory`.
    """
    assert memory is not None, "this compression keeps its error; give it a memory"
    assert memory.shape == gradient.shape, (
        f"memory of {memory.shape} for a gradient of {gradient.shape}"
    )
    assert torch.promote_types(memory.dtype, gradient.dtype) == memory.dtype, (
        f"{memory.dtype} cannot hold the error"
    )
    return memory + gradient


def write(out: Tensor, *pieces: Tensor) -> None:
    """Lay flat `pieces` one after the other into `out` (uint8)."""
    sizes_bytes = [piece.numel() * piece.itemsize for piece in pieces]
    assert out.dtype == torch.uint8, f"a message is bytes, not {out.dtype}"
    assert out.shape == (sum(sizes_bytes),), f"{tuple(out.shape)} for {sum(sizes_bytes)} bytes"
    for place, piece in zip(out.split(sizes_bytes), pieces, strict=True):
        place.copy_(piece.view(torch.uint8))


def read(message: Tensor, *layout: tuple[torch.dtype, int]) -> list[Tensor]:
    """The pieces that `write` laid into `message`, given the dtype and length of each. Copies.

    Raises: UsageError: a message of another size.
    """
    sizes_bytes = [count * dtype.itemsize for dtype, count in layout]
    if message.dtype != torch.uint8 or message.shape != (sum(sizes_bytes),):
        raise UsageError(
            f"a message of {message.numel():,} numbers of {message.dtype} was to be "
            f"{sum(sizes_bytes):,} bytes. "
            "Both ends must use the same compression, count and dtype."
        )
    pieces = zip(message.split(sizes_bytes), layout, strict=True)
    # Copied, for torch reads numbers of several bytes at their natural alignment only, and a
    # message lies anywhere.
    return [piece.clone().view(dtype) for piece, (dtype, _) in pieces]
