"""Types of tensors, and lists of tensors as one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.platform.tensors import (
    DTYPE_NUMBERS,
    DTYPES,
    accumulation_dtype,
    dense,
    flatten_tensors,
    unflatten_tensors,
)


def test_every_type_has_one_number() -> None:
    assert [DTYPES[DTYPE_NUMBERS[dtype]] for dtype in DTYPES] == list(DTYPES)
    assert len(DTYPE_NUMBERS) == len(DTYPES)


def test_every_type_that_torch_can_make_a_tensor_of_and_that_numbers_have_is_in_the_table() -> None:
    plain = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    assert {*plain, *floats, torch.complex64, torch.complex128} <= set(DTYPES)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.complex64, torch.complex64),
    ],
)
def test_numbers_are_summed_in_float32_at_least(dtype: torch.dtype, expected: torch.dtype) -> None:
    assert accumulation_dtype(dtype) == expected


def test_what_is_flattened_comes_back_in_its_shapes_and_in_memory_of_its_own() -> None:
    matrix = torch.arange(6.0).view(2, 3).t()
    tensors = [matrix, torch.tensor(7.0), torch.empty(0, 2), torch.ones(1)]
    flat = flatten_tensors(tensors)
    assert flat.tolist() == [0, 3, 1, 4, 2, 5, 7, 1]
    again = unflatten_tensors(flat, tensors)
    assert all(torch.equal(a, b) for a, b in zip(again, tensors, strict=True))
    flat.zero_()
    assert [a.count_nonzero().item() for a in again] == [0, 0, 0, 0]  # views of the flat one
    assert tensors[1] == 7.0


def test_padding_at_the_end_is_left_over() -> None:
    (found,) = unflatten_tensors(torch.arange(5.0), [torch.empty(2, 2)])
    assert found.tolist() == [[0, 1], [2, 3]]


def test_too_few_numbers_are_refused() -> None:
    with pytest.raises(RuntimeError, match="split_with_sizes"):
        unflatten_tensors(torch.zeros(3), [torch.empty(2, 2)])


def test_a_sparse_gradient_becomes_dense_and_a_dense_one_stays_itself() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1, 1])).sum().backward()
    gradient = table.weight.grad
    assert gradient is not None
    assert dense(gradient).tolist() == [[0, 0], [2, 2], [0, 0], [0, 0]]
    plain = torch.ones(2)
    assert dense(plain) is plain
