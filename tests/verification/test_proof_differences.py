"""Differences between two sets of tensors, also of empty, zero and infinite ones."""

import math

import torch

from shoal.verification.differences import differences


def test_a_difference_is_relative_to_the_largest_entry() -> None:
    assert differences({"a": torch.tensor([4.0, 2.0])}, {"a": torch.tensor([4.0, 3.0])}) == {
        "a": 0.25
    }


def test_what_has_no_entries_does_not_differ() -> None:
    tensors = {"empty": torch.zeros(0, 4), "full": torch.ones(2)}
    assert differences(tensors, tensors) == {"empty": 0.0, "full": 0.0}
    assert differences({"empty": torch.zeros(0, 4)}, {"empty": torch.zeros(0, 4)}) == {"empty": 0.0}


def test_zeros_are_equal_to_zeros_and_to_nothing_else() -> None:
    assert differences({"a": torch.zeros(2)}, {"a": torch.zeros(2)}) == {"a": 0.0}
    assert differences({"a": torch.zeros(2)}, {"a": torch.ones(2)}) == {"a": math.inf}


def test_a_mask_of_infinities_neither_differs_nor_hides_what_does() -> None:
    mask = torch.tensor([0.0, -math.inf])
    found = differences(
        {"mask": mask, "a": torch.ones(2)}, {"mask": mask.clone(), "a": torch.full((2,), 1.5)}
    )
    assert found == {"mask": 0.0, "a": 0.5}


def test_a_nan_is_never_equal() -> None:
    broken = torch.tensor([1.0, math.nan])
    assert math.isnan(differences({"a": torch.ones(2)}, {"a": broken})["a"])
    assert math.isnan(differences({"a": broken}, {"a": broken})["a"])


def test_numbers_of_any_type_are_compared() -> None:
    expected = {"count": torch.tensor(8), "flag": torch.tensor([True, False])}
    assert (
        differences(expected, {"count": torch.tensor(4), "flag": torch.tensor([True, True])})[
            "count"
        ]
        == 0.5
    )
    assert (
        differences(expected, {"count": torch.tensor(8), "flag": torch.tensor([True, True])})[
            "flag"
        ]
        == 1.0
    )
