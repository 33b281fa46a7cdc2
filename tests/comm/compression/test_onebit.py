"""Compression to one bit: two means, and the bits that select them."""

import torch
from compression_cases import arrived, message_of, numbers, repeatable
from hypothesis import given
from hypothesis import strategies as st

from shoal.comm.compression.onebit import OneBit


def test_onebit_sends_two_means() -> None:
    gradient = torch.tensor([1.0, -5.0, 0.0, 3.0, -2.0])
    memory = torch.zeros(5)
    sent = torch.tensor([4 / 3, -3.5, 4 / 3, 4 / 3, -3.5])
    assert torch.equal(arrived(OneBit(), gradient, memory), sent)
    assert torch.equal(memory, gradient - sent)


def test_onebit_lays_its_bits_out_lowest_first() -> None:
    signs = torch.tensor([1, 0, 1, 1, 0, 0, 0, 0, 0, 1], dtype=torch.float32) * 2 - 1
    message = message_of(OneBit(), signs)
    assert message[:8].view(torch.float32).tolist() == [-1.0, 1.0]
    assert message[8:].tolist() == [0b00001101, 0b00000010]


@repeatable
@given(st.lists(st.booleans(), max_size=70))
def test_every_pattern_of_signs_arrives(signs: list[bool]) -> None:
    gradient = torch.tensor(signs, dtype=torch.float32) * 2 - 1
    assert torch.equal(arrived(OneBit(), gradient), gradient)


def test_the_means_of_half_precision_do_not_overflow() -> None:
    for dtype in (torch.float16, torch.float32):
        gradient = torch.full((5000,), torch.finfo(dtype).max, dtype=dtype)
        assert torch.equal(arrived(OneBit(), gradient), gradient)


def test_a_sum_beyond_float64_is_infinite_and_changes_no_memory() -> None:
    gradient = torch.full((3,), 1e308, dtype=torch.float64)
    memory = torch.zeros_like(gradient)
    assert arrived(OneBit(), gradient, memory).isinf().all()
    assert not memory.any()


@repeatable
@given(numbers)
def test_the_residual_of_two_means_is_within_the_bound_of_the_proof(
    values: list[float],
) -> None:
    gradient = torch.tensor(values, dtype=torch.float64)
    left = (arrived(OneBit(), gradient) - gradient).square().sum()
    bound = gradient.square().sum() - gradient.abs().sum().square() / max(1, len(values))
    assert left <= bound + 1e-12 * gradient.square().sum()
