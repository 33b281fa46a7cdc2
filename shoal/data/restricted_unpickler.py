"""Read the pickles in which CIFAR is distributed, without running any code that a pickle names.

A pickle is a program: it may import and call any function by name. CIFAR's files need only the
names by which numpy rebuilds an array. This module replaces each of these names by a few lines of
its own. No other name is looked up, and not even numpy's own code is called. The result can contain
only numbers, text, lists, dicts and arrays of bytes.

Source: the Python documentation, pickle, "Restricting Globals".
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np


def read(content: bytes) -> Any:
    """Unpickle. Text that Python 2 wrote becomes bytes; arrays become `ByteArray`.

    Raises: ValueError: the pickle is damaged, or names a function outside `STAND_INS`.
    """
    try:
        return _Reader(io.BytesIO(content), encoding="bytes").load()
    # A damaged pickle is a damaged program, so it stops with any of these.
    except (
        pickle.UnpicklingError,
        EOFError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        MemoryError,
    ) as error:
        raise ValueError(str(error) or type(error).__name__) from error


class ByteArray:
    """A numpy array of bytes, in the form in which a pickle describes it."""

    def __init__(
        self, content: bytes = b"", shape: tuple[int, ...] = (0,), order: str = "C"
    ) -> None:
        self.content = content
        self.shape = shape
        self.order = order

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _version, self.shape, kind, is_fortran, self.content = state
        self.order = "F" if is_fortran else "C"
        _check_bytes(kind)

    def numpy(self) -> np.ndarray:
        """Return a uint8 array of `shape`. Raises: ValueError: shape and content do not agree."""
        return np.frombuffer(self.content, np.uint8).reshape(
            self.shape, order="F" if self.order == "F" else "C"
        )


class _DtypeStandIn:
    """Replace numpy.dtype."""

    def __init__(self, name: str | bytes, *_: Any) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None:
        """Ignore byte order and alignment; a byte has neither."""


def _reconstruct(*_: Any) -> ByteArray:
    return ByteArray()


def _from_buffer(
    content: bytes, kind: _DtypeStandIn, shape: tuple[int, ...], order: str
) -> ByteArray:
    _check_bytes(kind)
    return ByteArray(content, shape, order)


def _check_bytes(kind: _DtypeStandIn) -> None:
    if kind.name not in ("u1", b"u1"):
        raise pickle.UnpicklingError(f"an array of {kind.name!r}; only bytes, 'u1', belong here")


def _encode(text: str, encoding: str) -> bytes:
    """Replace `_codecs.encode`, with which Python 3 pickles bytes for Python 2."""
    return text.encode("latin-1")


STAND_INS: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): ByteArray,
    ("numpy", "dtype"): _DtypeStandIn,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy.core.numeric", "_frombuffer"): _from_buffer,
    ("numpy._core.numeric", "_frombuffer"): _from_buffer,
    ("_codecs", "encode"): _encode,
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in STAND_INS:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, which has no place in it; nothing was run"
            )
        return STAND_INS[module, name]
