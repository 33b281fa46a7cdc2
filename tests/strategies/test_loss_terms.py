"""Losses that are divided by counts of the whole batch, and what is returned beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
from shoal.errors import UsageError
from shoal.strategies.base import TOTALS_LENGTH, Extra
from shoal.strategies.loss_terms import Counted, join, split_result


def value_of(loss: Counted) -> float:
    """Return a loss whose counts are those of the whole batch."""
    values = [t.value if t.count is None else t.value / t.count for t in loss.terms]
    return float(sum(values).detach())  # type: ignore[union-attr]


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


def test_counted_losses_are_added_and_scaled_as_numbers_are() -> None:
    first, second = shoal.counted(number(6.0), 4), shoal.counted(number(10.0), torch.tensor([5]))
    assert value_of(2 * first + second / 4) == pytest.approx(3.5)
    assert value_of(first - second) == pytest.approx(-0.5)
    assert value_of(number(0.25) - first) == pytest.approx(-1.25)
    assert value_of(-first - number(0.25)) == pytest.approx(-1.75)
    assert value_of(sum([first, second])) == pytest.approx(3.5)
    assert value_of(first + number(0.25)) == pytest.approx(1.75)
    assert value_of(number(0.25) + first * torch.tensor(2.0)) == pytest.approx(3.25)


@pytest.mark.parametrize(
    ("compute", "words"),
    [
        (lambda one: one + 1.5, "a counted loss and a float cannot be added"),
        (lambda one: one * "2", "cannot be scaled by a str"),
        (lambda one: one / None, "cannot be scaled by a NoneType"),
        (lambda one: shoal.counted(torch.ones(3), 3), r"must be a scalar tensor, and is \(3,\)"),
        (lambda one: shoal.counted(1.0, 3), "must be a scalar tensor, and is float"),
        (lambda one: shoal.counted(number(1.0), number(3.0)), "one number without a gradient"),
        (lambda one: shoal.counted(number(1.0), torch.ones(2)), "one number without a gradient"),
        (lambda one: shoal.counted(number(1.0), -1), "the count -1 is no number from 0 on"),
        (lambda one: shoal.summed("2"), "takes a number or a tensor; it is a str"),
        (lambda one: shoal.summed(torch.ones(2, 2)), r"its shape is \(2, 2\)"),
    ],
)
def test_what_is_no_loss_or_count_is_refused_with_its_value(compute: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        compute(shoal.counted(number(6.0), 4))


def joined(*values: Any) -> Any:
    """Return values of micro-batches of 3, 1, ... samples as those of one step."""
    samples = (3, 1, 2)[: len(values)]
    extras = [Extra(n, value) for n, value in zip(samples, values, strict=True)]
    return join(extras, torch.zeros(TOTALS_LENGTH, dtype=torch.float64))


def test_values_beside_a_loss_are_joined_over_micro_batches() -> None:
    rows = joined(torch.ones(3, 2), torch.zeros(1, 2))
    assert rows.sum(1).tolist() == [2, 2, 2, 0]
    assert joined({"a": (1.0, "x")}, {"a": (3.0, "x")}) == {"a": (1.5, "x")}
    assert joined(torch.tensor(1.0), torch.tensor(3.0)) == 1.5
    assert joined(torch.tensor(4)).item() == 4


def test_values_that_cannot_be_joined_are_refused_with_their_kind() -> None:
    with pytest.raises(UsageError, match="returned a str beside the loss, and a step has 2"):
        joined("a", "b")
    with pytest.raises(UsageError, match=r"shape \(5,\) beside the loss, for a micro-batch of 3"):
        joined(torch.ones(5), torch.ones(5))


def test_a_function_that_returns_no_loss_is_told_what_it_has_returned() -> None:
    with pytest.raises(UsageError, match="None"):
        split_result(None)
