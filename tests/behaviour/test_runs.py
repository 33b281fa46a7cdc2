"""Seeded runs give the losses, gradients and weights that were recorded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from . import circumstances, files, runs
from .circumstances import DOUBLE, SINGLE

RECORD = files.read("runs")
WEIGHTS = files.read_tensors("runs")


def test_every_run_is_recorded() -> None:
    assert RECORD["runs"].keys() == runs.RUNS.keys() == WEIGHTS.keys()


@pytest.mark.parametrize("name", runs.EVERY_DAY)
def test_a_seeded_run_gives_what_was_recorded(name: str) -> None:
    _compare(name, "fp64")


@pytest.mark.slow
@pytest.mark.parametrize("name", runs.MORE)
def test_another_seeded_run_gives_what_was_recorded(name: str) -> None:
    _compare(name, "fp64")


@pytest.mark.slow
@pytest.mark.parametrize("name", runs.RUNS)
def test_a_seeded_run_in_float32_gives_what_was_recorded(name: str) -> None:
    _compare(name, "fp32")


def _compare(name: str, precision: str) -> None:
    """Every rank's numbers: the same bits where they can be asked for, else the same values."""
    recorded, found = RECORD["runs"][name][precision], runs.measure(name, precision)
    if circumstances.same_bits(RECORD["circumstances"]):
        assert [rank.to_json() for rank in found] == recorded
        return
    # AdamW steps by the rounding of gradients that are zero: float32 weights are not near.
    tolerance = DOUBLE if precision == "fp64" else SINGLE
    for rank, expected in zip(found, recorded, strict=True):
        assert _values(vars(rank)) == pytest.approx(_values(expected), rel=tolerance)
        if precision == "fp64":
            assert_close(rank.weights, WEIGHTS[name], tolerance)


def _values(rank: dict[str, Any]) -> list[float]:
    return [float.fromhex(text) for text in rank["losses"] + rank["norms"]]


def assert_close(found: dict[str, Tensor], recorded: dict[str, Tensor], tolerance: float) -> None:
    """Relative to the largest number of each tensor."""
    assert found.keys() == recorded.keys()
    for name, expected in recorded.items():
        largest = expected.abs().max().item()
        torch.testing.assert_close(
            found[name].to(expected.dtype),
            expected,
            rtol=0,
            atol=tolerance * largest,
            msg=lambda text, name=name: f"{name}: {text}",
        )
