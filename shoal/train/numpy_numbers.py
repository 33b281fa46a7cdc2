"""Numbers of NumPy in files of torch.save, read without NumPy's own unpickling.

A learning rate that NumPy has computed is saved as one, in the optimizer's state beside the
weights: a type, and its bytes. These stand for NumPy's names while such a file is read, and take
nothing but a number.
"""

from __future__ import annotations

import struct
from contextlib import AbstractContextManager
from pickle import UnpicklingError
from typing import Any

import torch

_FORMATS = {"f2": "e", "f4": "f", "f8": "d", "b1": "?"} | {
    f"{kind}{size}": letter.upper() if kind == "u" else letter
    for size, letter in ((1, "b"), (2, "h"), (4, "i"), (8, "q"))
    for kind in "iu"
}
"""NumPy's names of types, and the letters of `struct`."""


class NumberType:
    """A type of numbers, in place of `numpy.dtype`."""

    def __init__(self, name: Any, *_options: Any) -> None:
        if not isinstance(name, str) or name not in _FORMATS:
            raise UnpicklingError(f"a NumPy value of type {name!r} is no number")
        self.format = f"<{_FORMATS[name]}"

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) > 1 and state[1] == ">":
            self.format = f">{self.format[1:]}"


def number(kind: Any, raw: Any) -> float | int | bool:
    """Return the number in `raw`, in place of `numpy.core.multiarray.scalar`."""
    if not isinstance(kind, NumberType) or not isinstance(raw, bytes):
        raise UnpicklingError("a NumPy value is no number")
    try:
        (value,) = struct.unpack(kind.format, raw)
    except struct.error as error:
        raise UnpicklingError(f"a NumPy value is no number: {error}") from error
    return value  # type: ignore[no-any-return]  # of a format in _FORMATS


def numbers_of_numpy() -> AbstractContextManager[None]:
    """Let `torch.load(weights_only=True)` read single numbers of NumPy inside the block."""
    stand_ins: list[Any] = [
        (number, "numpy.core.multiarray.scalar"),  # NumPy 1
        (number, "numpy._core.multiarray.scalar"),
        (NumberType, "numpy.dtype"),
    ]
    block: AbstractContextManager[None] = torch.serialization.safe_globals(stand_ins)
    return block
