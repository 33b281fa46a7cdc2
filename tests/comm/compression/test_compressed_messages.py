"""Messages of every compression: size, alignment, values that are not finite, damage."""

import math

import pytest
import torch
from compression_cases import (
    DTYPES,
    arrived,
    every_dtype,
    every_scheme,
    message_of,
    normal,
    repeatable,
    zeros_to_keep,
)
from hypothesis import given
from hypothesis import strategies as st

from shoal.comm.compression.base import Compression
from shoal.comm.compression.half import Bf16, Fp16
from shoal.comm.compression.onebit import OneBit
from shoal.comm.compression.topk import TopK
from shoal.errors import UsageError

COUNTS = [0, 1, 2, 7, 8, 9, 1023, 1024, 1025, 3001]


@pytest.mark.parametrize(
    ("scheme", "dtype", "count", "size_bytes"),
    [
        (Bf16(), torch.float32, 1000, 2000),
        (Fp16(), torch.float64, 1000, 2004),
        (TopK(0.01), torch.float32, 1000, 10 * (4 + 4)),
        (TopK(0.01), torch.float64, 1001, 11 * (8 + 4)),
        (TopK(0.01), torch.bfloat16, 3, 1 * (2 + 4)),
        (TopK(0.07), torch.float32, 100, 7 * (4 + 4)),
        (TopK(1e-05), torch.float32, 1_000_000, 10 * (4 + 4)),
        (TopK(0.5), torch.float32, 0, 0),
        (OneBit(), torch.float32, 1000, 8 + 125),
        (OneBit(), torch.float64, 1001, 16 + 126),
        (OneBit(), torch.float16, 0, 4),
    ],
)
def test_a_message_is_as_large_as_the_page_says(
    scheme: Compression, dtype: torch.dtype, count: int, size_bytes: int
) -> None:
    assert scheme.size_bytes(count, dtype) == size_bytes


@every_scheme
@every_dtype
@pytest.mark.parametrize("count", COUNTS)
def test_a_message_fills_its_place_exactly_wherever_that_lies(
    scheme: Compression, dtype: torch.dtype, count: int
) -> None:
    gradient = normal(count, dtype)
    size_bytes = scheme.size_bytes(count, dtype)
    messages = []
    for start, filling in ((0, 0), (0, 255), (1, 0), (3, 255)):
        buffer = torch.full((start + size_bytes + 5,), filling, dtype=torch.uint8)
        out = buffer[start : start + size_bytes]
        scheme.encode(gradient, zeros_to_keep(scheme, gradient), out)
        decoded = scheme.decode(out, count, dtype)
        assert (decoded.shape, decoded.dtype) == ((count,), dtype)
        assert set(buffer[:start].tolist() + buffer[start + size_bytes :].tolist()) == {filling}
        messages.append(out)
    assert all(torch.equal(message, messages[0]) for message in messages)
    assert torch.equal(gradient, normal(count, dtype))


@every_scheme
@every_dtype
def test_what_is_decoded_outlives_the_message(scheme: Compression, dtype: torch.dtype) -> None:
    message = message_of(scheme, normal(100, dtype))
    decoded = scheme.decode(message, 100, dtype)
    copy = decoded.clone()
    message.fill_(0)
    assert torch.equal(decoded, copy)


@every_scheme
def test_the_same_gradients_give_the_same_bits_with_any_number_of_threads(
    scheme: Compression,
) -> None:
    gradients = [normal(200_003, torch.float32, seed) for seed in range(2)]
    before = torch.get_num_threads()
    runs = []
    try:
        for threads in (1, 1, 2, 3):
            torch.set_num_threads(threads)
            memory = zeros_to_keep(scheme, gradients[0])
            runs.append([message_of(scheme, gradient, memory) for gradient in gradients])
    finally:
        torch.set_num_threads(before)
    for run in runs[1:]:
        assert all(torch.equal(one, other) for one, other in zip(runs[0], run, strict=True))


@every_scheme
@pytest.mark.parametrize("spoiled", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 5, 1999])
@every_dtype
def test_a_gradient_that_is_not_finite_stays_so_and_changes_no_memory(
    scheme: Compression, spoiled: float, place: int, dtype: torch.dtype
) -> None:
    gradient = normal(2000, dtype)
    memory = normal(2000, dtype, seed=1) if scheme.keeps_error else None
    gradient[place] = spoiled
    assert not arrived(scheme, gradient, memory).isfinite().all()
    if memory is not None:
        assert torch.equal(memory, normal(2000, dtype, seed=1))


@every_scheme
def test_a_gradient_of_nothing_but_nan_arrives_as_nan(scheme: Compression) -> None:
    assert arrived(scheme, torch.full((50,), math.nan)).isnan().any()


@every_scheme
def test_zeros_arrive_as_zeros(scheme: Compression) -> None:
    assert torch.equal(arrived(scheme, torch.zeros(50)), torch.zeros(50))


@every_scheme
def test_a_message_of_another_size_is_refused(scheme: Compression) -> None:
    message = message_of(scheme, normal(50))
    for wrong in (message[:-1], message[:0], torch.cat([message, message])):
        with pytest.raises(
            UsageError, match="Both ends must use the same compression, count and dtype"
        ):
            scheme.decode(wrong, 50, torch.float64)


@every_scheme
@repeatable
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(0, 40), dtype=st.sampled_from(DTYPES))
def test_random_bytes_are_decoded_to_the_right_shape_or_refused(
    scheme: Compression, seed: int, count: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    message = torch.randint(
        256, (scheme.size_bytes(count, dtype),), generator=generator, dtype=torch.uint8
    )
    try:
        decoded = scheme.decode(message, count, dtype)
    except UsageError:
        return
    assert decoded.shape == (count,)
