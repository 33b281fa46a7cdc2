"""Compression to two bytes: rounding and range of bf16 and fp16."""

import pytest
import torch
from compression_cases import arrived, message_of, normal

from shoal.comm.compression.base import Compression
from shoal.comm.compression.half import Bf16, Fp16
from shoal.errors import UsageError


def test_bf16_rounds_to_nearest_and_ties_to_even() -> None:
    half = 2.0**-8
    gradient = torch.tensor([1 + half, 1 + 3 * half, 1 + half + 2**-20, -1 - half, 3.0, 1e-40])
    expected = torch.tensor(
        [1.0, 1 + 4 * half, 1 + 2 * half, -1.0, 3.0, float(torch.tensor(1e-40).bfloat16())]
    )
    assert torch.equal(arrived(Bf16(), gradient), expected)


@pytest.mark.parametrize("scheme", [Bf16(), Fp16()], ids=str)
def test_rounding_is_within_half_a_unit_of_the_last_place(scheme: Compression) -> None:
    gradient = normal(5000, torch.float64)
    bits = 8 if isinstance(scheme, Bf16) else 11
    error = (arrived(scheme, gradient) - gradient).abs() / gradient.abs()
    assert 2.0 ** -(bits + 1) < error.max() <= 2.0**-bits * (1 + 1e-6)


@pytest.mark.parametrize("largest", [1e-300, 1e-30, 1e-5, 65504.0, 65519.9, 65520.0, 1e30, 1e300])
def test_fp16_neither_overflows_nor_loses_small_gradients(largest: float) -> None:
    gradient = largest * torch.tensor([1.0, -0.7, 1e-3, 2.0**-28], dtype=torch.float64)
    torch.testing.assert_close(
        arrived(Fp16(), gradient), gradient, rtol=2.0**-11 * (1 + 1e-6), atol=0
    )


def test_fp16_holds_the_range_of_float32() -> None:
    for largest in (3.4e38, 1.2e-38):
        gradient = torch.tensor([largest, -largest / 3])
        torch.testing.assert_close(arrived(Fp16(), gradient), gradient, rtol=2.0**-11, atol=0)


@pytest.mark.parametrize(("scheme", "dtype"), [(Bf16(), torch.bfloat16), (Fp16(), torch.float16)])
def test_gradients_that_are_narrow_already_arrive_unchanged(
    scheme: Compression, dtype: torch.dtype
) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    every = every[every.isfinite()]
    assert torch.equal(arrived(scheme, every), every)
    few = every[(every > 0) & (every < 1e-4)]
    assert torch.equal(arrived(scheme, few), few)


def test_a_damaged_shift_is_refused() -> None:
    message = message_of(Fp16(), torch.ones(3))
    message[:4] = torch.tensor([255, 255, 255, 127], dtype=torch.uint8)
    with pytest.raises(UsageError, match=r"a factor of 2\^2147483647: it is damaged"):
        Fp16().decode(message, 3, torch.float32)
