"""Odd arguments of the Python API raise an error of Shoal's, before ranks connect."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shoal
from shoal.errors import ShoalError

HUGE = 10**21
INIT: list[dict[str, Any]] = [
    *({"strategy": value} for value in (None, 3, b"ddp", "", "nonsense", "ddp,ddp", "tensor=0")),
    *({"strategy": value} for value in (["ddp"], "server=1000000", "a:b c", "x" * 5000, "\x00")),
    *({"seed": value} for value in (None, "1", 1.5, True, 2**64, HUGE, float("nan"), [])),
    *({"accumulate": value} for value in (None, "1", 1.5, True, 0, -1, HUGE, float("nan"), [])),
    *({"precision": value} for value in (None, "", "fp8", "FP32", 32, torch.float32, ["fp32"])),
    *({"draws": value} for value in (None, "", "ranks", 3, True, ["rank"])),
    *({"trace": value} for value in ("", "x", "0", "3@", -1, 3, "101", True, ["3"])),
]


@pytest.mark.parametrize("arguments", INIT, ids=lambda given: repr(given)[:60])
def test_odd_arguments_of_init_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ShoalError) as error:
        shoal.init(**{"announce": lambda _: None, **arguments})
    assert next(iter(arguments)) in str(error.value) or "strategy" in str(error.value)
