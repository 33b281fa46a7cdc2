"""Top-k: the elements that are sent, and the messages that are refused."""

import math
from fractions import Fraction

import pytest
import torch
from compression_cases import arrived, message_of, normal, numbers, repeatable
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shoal.comm.compression.topk import STRIDE, TopK
from shoal.errors import UsageError


def test_topk_sends_the_largest_magnitudes_where_they_stand() -> None:
    gradient = torch.tensor([1.0, -5.0, 0.0, 3.0, -2.0])
    memory = torch.zeros(5)
    assert arrived(TopK(0.4), gradient, memory).tolist() == [0.0, -5.0, 0.0, 3.0, 0.0]
    assert memory.tolist() == [1.0, 0.0, 0.0, 0.0, -2.0]


def test_of_equal_magnitudes_topk_sends_the_first() -> None:
    gradient = torch.tensor([1.0, -2.0, 2.0, -2.0, 3.0, 2.0])
    assert arrived(TopK(0.5), gradient).tolist() == [0.0, -2.0, 2.0, 0.0, 3.0, 0.0]


@repeatable
@given(numbers, st.sampled_from([1e-3, 0.07, 0.3, 0.5, 1.0]))
def test_topk_sends_as_many_as_were_asked_for_and_none_that_is_smaller(
    values: list[float], fraction: float
) -> None:
    gradient = torch.tensor(values, dtype=torch.float64)
    memory = torch.zeros_like(gradient)
    message = message_of(TopK(fraction), gradient, memory)
    kept = math.ceil(Fraction(str(fraction)) * len(values))
    indices = message[8 * kept :].clone().view(torch.int32).tolist()
    ranked = sorted(range(len(values)), key=lambda index: (-abs(values[index]), index))
    assert indices == sorted(ranked[:kept])


def misleading(count: int) -> Tensor:
    """Return values whose sample, one in STRIDE, looks much larger than they are."""
    gradient = normal(count)
    gradient[::STRIDE] *= 1e3
    return gradient


@pytest.mark.parametrize("fraction", [1e-4, 0.01, 0.1, 0.5, 0.99])
@pytest.mark.parametrize(
    "gradient",
    [
        normal(20_000),
        normal(20_000).sort().values,
        normal(20_000).exp().round(),
        normal(20_000) * (torch.arange(20_000) % 500 == 0),
        misleading(20_000),
        -1 / misleading(20_000),
        torch.ones(20_000, dtype=torch.float64),
    ],
    ids=[
        "normal",
        "sorted",
        "ties",
        "mostly zero",
        "sample too large",
        "sample too small",
        "equal",
    ],
)
def test_of_many_numbers_topk_sends_the_same_as_sorting_does(
    gradient: Tensor, fraction: float
) -> None:
    kept = TopK(fraction).num_selected(len(gradient))
    expected = torch.zeros_like(gradient)
    first = gradient.abs().sort(descending=True, stable=True).indices[:kept]
    expected[first] = gradient[first]
    assert torch.equal(arrived(TopK(fraction), gradient), expected)


def test_of_what_is_not_finite_topk_sends_as_much_as_fits() -> None:
    gradient = torch.tensor([1.0, math.inf, 5.0, math.nan, 2.0, -math.inf])
    assert arrived(TopK(0.3), gradient).isfinite().tolist() == [
        True,
        False,
        True,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize("indices", [[0, 0], [3, 2], [-1, 2], [2, 5], [2**31 - 1, -(2**31)]])
def test_indices_that_do_not_ascend_within_the_gradient_are_refused(indices: list[int]) -> None:
    message = message_of(TopK(0.4), torch.ones(5))
    message[8:] = torch.tensor(indices, dtype=torch.int32).view(torch.uint8)
    with pytest.raises(UsageError, match="do not ascend from 0 to 4"):
        TopK(0.4).decode(message, 5, torch.float32)


def test_more_numbers_than_32_bits_can_name_are_refused() -> None:
    assert TopK(0.01).size_bytes(2**31 - 1, torch.float32) == 21_474_837 * 8
    with pytest.raises(
        UsageError, match="cut 2,147,483,648 numbers in parts of at most 2,147,483,647"
    ):
        TopK(0.01).size_bytes(2**31, torch.float32)
