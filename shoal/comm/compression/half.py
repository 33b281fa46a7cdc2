"""Compression to two bytes for each element, bfloat16 and float16, without error feedback; and
means over ranks of gradients that are rounded to two bytes for each message:

      rank 0   a0 b0 c0   [1] all-to-all   a0 a1 a2   [2] mean   A   [3] all-gather   A B C
      rank 1   a1 b1 c1       ─────────>   b0 b1 b2   ──────>    B       ─────────>   A B C
      rank 2   a2 b2 c2       in 2 bytes   c0 c1 c2  in float32  C       in 2 bytes   A B C

A rank sends 2(n-1)/n of the elements, as in a ring, in half of float32's bytes. Each value is
rounded twice, for any number of ranks: a ring that adds in two bytes rounds at every hop, and an
all-gather of all messages sends n/2 times as much."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shoal.comm.compression.base import BucketEntry, Compression, read, write
from shoal.comm.compression.error_feedback import CompressedReducer
from shoal.comm.equal_chunks import all_gather, all_to_all
from shoal.errors import UsageError
from shoal.platform.tensors import accumulation_dtype, tensor_on

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


class HalfPrecisionReducer(CompressedReducer):
    """Averages gradients that travel as bfloat16 or float16. Rounding errors are dropped.

    Args: compression: Bf16 or Fp16; Fp16 has one power of two for each rank's chunk of a bucket.
    """

    def __init__(self, compression: Compression) -> None:
        super().__init__()
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
