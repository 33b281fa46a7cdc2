"""A message on its way: what a rank sends, or what it waits for."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import Tensor

from shoal.errors import UsageError
from shoal.tensors import DTYPES
from shoal.trace.recorder import Flight

NO_LIMIT = timedelta(0)


class Pending:
    """Either end's part.

    Args:
        tensor: dense, on the CPU.
        other: rank among those of the host; None for whoever sends.

    Attributes:
        data: its numbers as bytes: its own where they lie in a row.
        at: bytes that have been sent, or have come.
    """

    kind = ""

    def __init__(self, tensor: Tensor, other: int | None, tag: int, flight: Flight | None = None) -> None:
        if tensor.dtype not in DTYPES or tensor.layout is not torch.strided:
            raise UsageError(
                f"{self.kind}: a tensor of type {tensor.dtype} and layout {tensor.layout} is not carried between the "
                "ranks of a host. Send its bytes (view(torch.uint8)) or its parts."
            )
        self.tensor, self.other, self.tag, self.flight = tensor.data, other, tag, flight
        self.dtype, self.size_bytes, self.at = tensor.dtype, tensor.numel() * tensor.element_size(), 0
        self.data = self._bytes()
        self.is_done = False
        self.error: Exception | None = None

    def _bytes(self) -> Tensor:
        raise NotImplementedError

    def is_settled(self) -> bool:
        """Whether it is over, well or not."""
        return self.is_done or self.error is not None

    def finish(self) -> None:
        """It has arrived."""
        self.is_done = True
        if self.flight is not None:
            self.flight.land()

    def describe(self, names: list[int]) -> str:
        """As a user reads it. Args: names: what the ranks of the host are called."""
        who = "any rank" if self.other is None else f"rank {names[self.other]}"
        word = "to" if self.kind == "send" else "from"
        count = self.size_bytes // self.dtype.itemsize
        return f"{self.kind}({count:,} x {str(self.dtype).removeprefix('torch.')} {word} {who}, tag {self.tag})"


class Sending(Pending):
    """A message from this rank.

    Attributes:
        end: what the other rank will have taken of the channel when it is done; None while not all is sent.
    """

    kind = "send"
    end: int | None = None

    def _bytes(self) -> Tensor:
        return self.tensor.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)


class Receiving(Pending):
    """A message for this rank.

    Attributes:
        source: whose it turned out to be.
    """

    kind = "recv"
    source: int | None = None

    def _bytes(self) -> Tensor:
        tensor = self.tensor
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            return tensor.reshape(-1).view(torch.uint8)
        if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise UsageError(
                f"recv: the tensor of shape {tuple(tensor.shape)} has strides {tensor.stride()}: several of its "
                "numbers lie in one place. Receive into a tensor of its own (clone())."
            )
        return torch.empty(self.size_bytes, dtype=torch.uint8)

    def finish(self) -> None:
        if self.data.numel() and self.data.data_ptr() != self.tensor.data_ptr():
            self.tensor.copy_(self.data.view(self.dtype).view(self.tensor.shape))
        super().finish()


class Kept:
    """A message that came before anybody asked for it, while one behind it was asked for.

    Attributes:
        receiving: who has asked for it since.
    """

    def __init__(self, tag: int, dtype: torch.dtype, size_bytes: int) -> None:
        self.tag, self.dtype, self.size_bytes, self.at = tag, dtype, size_bytes, 0
        self.data = torch.empty(size_bytes, dtype=torch.uint8)
        self.receiving: Receiving | None = None

    @property
    def is_whole(self) -> bool:
        return self.at == self.size_bytes
