"""Parts of which only some blocks are sent: what comes out is what went in, bit for bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.server import blocks
from shoal.server.messages import view
from shoal.server.said import Refused


@given(
    length=st.integers(1, 300),
    touched=st.sets(st.integers(0, 299)),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_what_is_packed_and_unpacked_into_zeros_is_what_it_was(
    length: int, touched: set[int], dtype: torch.dtype
) -> None:
    numbers = torch.zeros(length, dtype=dtype)
    for index in touched:
        numbers[index % length] = -0.0 if index % 7 == 0 else index + 0.5
    found = torch.zeros(length, dtype=dtype)
    blocks.unpack(view(blocks.pack(numbers, blocks.touched(numbers))), found)
    assert torch.equal(found.view(torch.uint8), numbers.view(torch.uint8))


@given(length=st.integers(1, 300), indices=st.sets(st.integers(0, 299)))
def test_blocks_that_have_changed_make_the_old_numbers_the_new_ones(length: int, indices: set[int]) -> None:
    before = torch.arange(float(length))
    after = before.clone()
    for index in indices:
        after[index % length] = -1.0
    which = blocks.changed(before, after)
    blocks.unpack(view(blocks.pack(after, which)), before)
    assert torch.equal(before, after)


@pytest.mark.parametrize("change", [-1, 1, 128])
def test_a_message_of_another_length_than_it_says_is_refused(change: int) -> None:
    numbers = torch.zeros(100)
    numbers[50] = 1
    message = bytes(view(blocks.pack(numbers, blocks.touched(numbers))))
    wrong = message[:change] if change < 0 else message + bytes(change)
    with pytest.raises(Refused, match="blocks in a message"):
        blocks.unpack(memoryview(bytearray(wrong)), torch.zeros(100))
    with pytest.raises(Refused, match="take 1 to name"):
        blocks.unpack(memoryview(b""), torch.zeros(100))
