"""Compression to two bytes for each element: bfloat16 and float16, without error feedback."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.comm.compression.base import read, write
from shoal.errors import UsageError
from shoal.platform.tensors import tensor_on

LARGEST = 65504.0
"""The largest finite value of float16."""


@dataclass(frozen=True)
class Bf16:
    """Rounds each element to bfloat16: 8 bits of precision with float32's range.

    Rounding is to nearest, ties to even. Values of float64 above 3.39e38 become infinite, as in
    IEEE 754. torch rounds float64 to float32 on the way."""

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
    """Rounds each element to float16 after multiplication by a power of two: 11 bits of precision.

        message   [shift: int32] [gradient x 2^shift: float16 ...]

    The shift is the highest with which the largest magnitude fits, so float16 does not overflow:
    only values within 2^-12 of the largest value of their own dtype can become infinite. Values
    down to 2^-29 of the gradient's largest keep all 11 bits; those below 2^-40 of it become 0. A
    gradient of float16 arrives unchanged. A gradient that is not finite is sent with shift 0."""

    keeps_error: ClassVar[bool] = False

    def size_bytes(self, count: int, dtype: torch.dtype) -> int:
        return 4 + 2 * count

    def encode(self, gradient: Tensor, memory: Tensor | None, out: Tensor) -> None:
        assert memory is None, "fp16 keeps no error"
        shift = _shift(gradient)
        header = tensor_on([shift], torch.int32, gradient.device)
        write(out, header, (gradient * 2.0**shift).to(torch.float16))

    def decode(self, message: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        header, rounded = read(message, (torch.int32, 1), (torch.float16, count))
        shift = int(header)
        if not -1023 <= shift <= _max_shift(dtype):
            raise UsageError(
                f"a message of fp16 tells of a factor of 2^{shift}: it is damaged, or of another "
                "dtype."
            )
        return rounded.to(dtype, copy=True).div_(2.0**shift)


def _shift(gradient: Tensor) -> int:
    """Return the highest shift for which `gradient` x 2^shift fits into float16."""
    # Read once: on a GPU each read waits.
    ends = torch.stack(gradient.aminmax()) if gradient.numel() else gradient.new_zeros(1)
    largest = float(ends.abs().max())
    if not math.isfinite(largest):
        return 0
    mantissa, exponent = math.frexp(largest)
    shift = 16 - exponent
    if mantissa * 2**16 > LARGEST:
        shift -= 1
    return min(shift, _max_shift(gradient.dtype))


def _max_shift(dtype: torch.dtype) -> int:
    """Return the highest shift whose factor is finite in the dtype in which torch multiplies.

    This is float64 for float64, else float32.
    """
    return 1023 if dtype == torch.float64 else 127
