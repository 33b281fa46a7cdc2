"""Every strategy trains as one process does: gradients and SGD weights agree to 1e-10 in float64."""

import pytest
from cases import CASES

from shoal.testing.check_strategy import check_strategy

# One row a strategy and a number of ranks.
LAYOUTS = [
    ("single", 1),
    ("ddp", 1),
    ("ddp", 2),
    ("ddp", 3),
    ("ddp", 4),
    ("ddp,unused=true", 2),
    ("zero1", 1),
    ("zero1", 3),
    ("zero2", 2),
    ("zero3", 2),
    ("zero3", 3),
    ("zero3,hybrid=2", 4),
    ("zero3,unit=Linear", 2),
    ("zero2,offload=true", 2),
    ("recompute,unit=Linear", 1),
    ("recompute=2,unit=Linear,zero3", 2),
]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("strategy", "ranks"), LAYOUTS)
def test_gradients_and_weights_are_those_of_one_process(strategy: str, ranks: int, name: str) -> None:
    check_strategy(strategy, ranks, CASES[name])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("strategy", "ranks", "accumulate"),
    [("ddp", 1, 3), ("ddp", 2, 2), ("ddp", 3, 4), ("zero1", 2, 3), ("zero2", 2, 2), ("zero3", 3, 4)],
)
def test_accumulation_changes_no_number(strategy: str, ranks: int, accumulate: int, name: str) -> None:
    check_strategy(strategy, ranks, CASES[name], accumulate)
