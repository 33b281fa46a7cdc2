"""Messages of some blocks of a partition: they are unpacked bit for bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.parameter_server import sparse_blocks
from shoal.parameter_server.codec import as_bytes
from shoal.parameter_server.events import ProtocolViolation


@given(
    length=st.integers(1, 300),
    touched=st.sets(st.integers(0, 299)),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_blocks_unpacked_into_zeros_restore_the_values(
    length: int, touched: set[int], dtype: torch.dtype
) -> None:
    numbers = torch.zeros(length, dtype=dtype)
    for index in touched:
        numbers[index % length] = -0.0 if index % 7 == 0 else index + 0.5
    found = torch.zeros(length, dtype=dtype)
    sparse_blocks.unpack(
        as_bytes(sparse_blocks.pack(numbers, sparse_blocks.nonzero_blocks(numbers))), found
    )
    assert torch.equal(found.view(torch.uint8), numbers.view(torch.uint8))


@given(length=st.integers(1, 300), indices=st.sets(st.integers(0, 299)))
def test_changed_blocks_turn_the_old_values_into_the_new_ones(
    length: int, indices: set[int]
) -> None:
    before = torch.arange(float(length))
    after = before.clone()
    for index in indices:
        after[index % length] = -1.0
    which = sparse_blocks.changed(before, after)
    sparse_blocks.unpack(as_bytes(sparse_blocks.pack(after, which)), before)
    assert torch.equal(before, after)


@pytest.mark.parametrize("change", [-1, 1, 128])
def test_a_message_of_another_length_than_it_says_is_refused(change: int) -> None:
    numbers = torch.zeros(100)
    numbers[50] = 1
    message = bytes(as_bytes(sparse_blocks.pack(numbers, sparse_blocks.nonzero_blocks(numbers))))
    wrong = message[:change] if change < 0 else message + bytes(change)
    with pytest.raises(ProtocolViolation, match="blocks in a message"):
        sparse_blocks.unpack(memoryview(bytearray(wrong)), torch.zeros(100))
    with pytest.raises(ProtocolViolation, match="take 1 to name"):
        sparse_blocks.unpack(memoryview(b""), torch.zeros(100))
