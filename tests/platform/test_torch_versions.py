"""A torch that was never tested is used, with a note."""

import pytest
import torch

import shoal
from shoal.platform.torch_versions import NEWEST, minor_version, untested


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.15.1+cu130"])
def test_of_a_tested_version_nothing_is_said(version: str) -> None:
    assert untested(version) == ""


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0.dev20261101", "3.0.0"])
def test_of_another_one_there_is_a_note(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    told: list[str] = []
    shoal.init(announce=told.append)
    assert told == [f"note: torch {version} was never tested with this Shoal; 2.11 to 2.15 are"]


def test_the_constraints_hold_a_tested_version() -> None:
    from pathlib import Path

    lines = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
    (version,) = [line.partition("==")[2] for line in lines if line.startswith("torch==")]
    assert minor_version(version) <= NEWEST
