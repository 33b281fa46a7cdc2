"""Two bytes a number: bfloat16 and float16. Each message is rounded by itself, so there is no
error to keep.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.comm.compression.base import read, write
from shoal.errors import UsageError

LARGEST = 65504.0
"""The largest number of float16."""


@dataclass(frozen=True)
class Bf16:
    """Each number rounded to bfloat16, to nearest, ties to even: 8 bits of precision over float32's
    range.

    Numbers beyond that range (above 3.39e38, which float64 has) arrive infinite, as IEEE 754 rounds
    them. torch rounds float64 to float32 on the way."""

    keeps_error: ClassVar[bool] = False

    def size_bytes(self, count: int, dtype: torch.dtype) -> int:
        return 2 * count

    def encode(self, gradient: Tensor, memory: Tensor | None, out: Tensor) -> None:
        assert memory is None, "bf16 keeps no error"
        write(out, gradient.to(torch.bfloat16))

    def decode(self, message: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        (rounded,) = read(message, (torch.bfloat16, count))
        return rounded.to(dtype)


@dataclass(frozen=True)
class Fp16:
    """Each number rounded to float16 after multiplication by a power of two: 11 bits of precision.

        message   [shift: int32] [gradient x 2^shift: float16 ...]

    The shift is the highest with which the largest number fits, so float16 does not overflow: only
    within 2^-12 of the largest number of its own dtype can a number round to infinity. Numbers down
    to 2^-29 of the gradient's largest keep all 11 bits; those below 2^-40 of it become 0. A
    gradient of float16 arrives unchanged. One that is not finite is sent with a shift of 0."""

    keeps_error: ClassVar[bool] = False

    def size_bytes(self, count: int, dtype: torch.dtype) -> int:
        return 4 + 2 * count

    def encode(self, gradient: Tensor, memory: Tensor | None, out: Tensor) -> None:
        assert memory is None, "fp16 keeps no error"
        shift = _shift(gradient)
        header = torch.tensor([shift], dtype=torch.int32, device=gradient.device)
        write(out, header, (gradient * 2.0**shift).to(torch.float16))

    def decode(self, message: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        header, rounded = read(message, (torch.int32, 1), (torch.float16, count))
        shift = int(header)
        if not -1023 <= shift <= _most(dtype):
            raise UsageError(
                f"a message of fp16 tells of a factor of 2^{shift}: it is damaged, or of another "
                "dtype."
            )
        return rounded.to(dtype, copy=True).div_(2.0**shift)


def _shift(gradient: Tensor) -> int:
    """The highest power of two by which `gradient` can be multiplied within float16."""
    largest = max(abs(float(end)) for end in gradient.aminmax()) if gradient.numel() else 0.0
    if not math.isfinite(largest):
        return 0
    mantissa, exponent = math.frexp(largest)
    shift = 16 - exponent
    if mantissa * 2**16 > LARGEST:
        shift -= 1
    return min(shift, _most(gradient.dtype))


def _most(dtype: torch.dtype) -> int:
    """The highest shift whose factor is finite where torch multiplies numbers of `dtype`: in
    float32, or float64.
    """
    return 1023 if dtype == torch.float64 else 127
