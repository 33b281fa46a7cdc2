"""Numbers of NumPy are read from a file of torch.save; nothing else of NumPy is."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.train.build import numbers_of_numpy


def read(path: Path, value: Any) -> Any:
    torch.save(value, path)
    with numbers_of_numpy():
        return torch.load(path, weights_only=True)


@pytest.mark.parametrize(
    "value",
    [
        *(np.float64(0.1), np.float32(-2.5), np.float16(0.5), np.int64(-7), np.uint8(200)),
        *(np.int16(-300), np.uint32(4_000_000_000), np.bool_(True)),
    ],
)
def test_a_number_of_numpy_is_read(value: Any, tmp_path: Path) -> None:
    found = read(tmp_path / "file", {"lr": value})["lr"]
    assert found == value
    assert type(found) is type(value)


class Forged:
    """Pickled as the call of a function that no file of numbers makes."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    "value",
    [
        *(np.zeros(2), np.str_("text"), np.datetime64("2026-01-01"), np.complex64(1j)),
        *(np.dtype("O"), Forged(np.zeros, (3,)), Forged(print, ("code",))),
        Forged(np.frombuffer, (b"12345678",)),
    ],
)
def test_nothing_else_of_numpy_is_read(value: Any, tmp_path: Path) -> None:
    with pytest.raises(pickle.UnpicklingError):
        read(tmp_path / "file", {"lr": value})
