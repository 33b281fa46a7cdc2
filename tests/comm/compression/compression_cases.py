"""Every compression, and helpers that send a gradient through it."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.comm.compression.base import Compression
from shoal.comm.compression.half import Bf16, Fp16
from shoal.comm.compression.onebit import OneBit
from shoal.comm.compression.topk import TopK

SCHEMES: list[Compression] = [Bf16(), Fp16(), TopK(0.1), OneBit()]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

every_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=str)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
repeatable = settings(derandomize=True, database=None)
numbers = st.lists(st.floats(-1e6, 1e6, width=32), max_size=40)


def normal(count: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(
        count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def zeros_to_keep(scheme: Compression, gradient: Tensor) -> Tensor | None:
    return torch.zeros_like(gradient) if scheme.keeps_error else None


def message_of(scheme: Compression, gradient: Tensor, memory: Tensor | None = None) -> Tensor:
    memory = zeros_to_keep(scheme, gradient) if memory is None else memory
    out = torch.empty(scheme.size_bytes(len(gradient), gradient.dtype), dtype=torch.uint8)
    scheme.encode(gradient, memory, out)
    return out


def arrived(scheme: Compression, gradient: Tensor, memory: Tensor | None = None) -> Tensor:
    return scheme.decode(message_of(scheme, gradient, memory), len(gradient), gradient.dtype)
