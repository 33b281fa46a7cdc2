"""Digests of tensors that find a changed bit, at the speed of a sum and on the tensor's device.

      bytes as int64   │ row of 4096 │ row of 4096 │ ... │ rest │
      sum of each row       s0            s1               sr        one changed bit changes its sum
      digest           s0 m0 + s1 m1 + ... + sr mr  (mod 2^64)       odd factors: rows have places

A change of one bit is always found. It is no cryptographic hash: it finds accidents.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from shoal.comm.norm import to_local

ROW = 4096
"""Values of eight bytes that one sum adds up."""
MULTIPLIER = 6364136223846793005
"""The multiplier of Knuth's MMIX, a linear congruential generator; factors are its powers."""


def tensor_digest(tensor: Tensor) -> Tensor:
    """Return a digest of the values' bits, a scalar int64 tensor on the same device.

    A DTensor counts with its shard on this rank. Tensors that are equal bit for bit have equal
    digests, whatever their strides.
    """
    data = as_bytes(to_local(tensor).detach())
    whole = data[: data.numel() // 8 * 8].view(torch.int64)
    rows = whole[: whole.numel() // ROW * ROW].view(-1, ROW).sum(1)
    rest = whole[rows.numel() * ROW :].sum()
    tail = data[whole.numel() * 8 :].to(torch.int64)
    tail = (tail * _factors(8, data.device)[: tail.numel()]).sum()
    sums = torch.cat((rows, rest.view(1), tail.view(1)))
    return (sums * _factors(len(sums), data.device)).sum()


def as_bytes(values: Tensor) -> Tensor:
    """Return the bytes of a tensor, (bytes,), uint8; a view of it where it is contiguous."""
    return values.contiguous().view(-1).view(torch.uint8)


@lru_cache(maxsize=64)
def _factors(count: int, device: torch.device) -> Tensor:
    """Return odd factors, (count,), int64, which nobody may write to."""
    factors = torch.full((count,), MULTIPLIER, dtype=torch.int64, device=device)
    factors[:1] = 1
    return factors.cumprod(0)  # mod 2^64
