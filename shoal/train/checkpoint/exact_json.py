"""JSON that keeps every float exact.

Finite floats are written with `repr`, which is exact. JSON cannot express the others: they are
written as `{"$float": "nan"}`, `"inf"` or `"-inf"`. Tuples are read as lists. Values whose type
would change otherwise are refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

MARK = "$float"
"""Key of an object that stands for a float which JSON cannot express."""


def problems(value: Any, where: str) -> list[str]:
    """Return a line for each part of `value` that would not be read back equal.

    Args:
        where: the path to `value`, with which each line begins.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return []
    if isinstance(value, list | tuple):
        return [
            problem for i, item in enumerate(value) for problem in problems(item, f"{where}[{i}]")
        ]
    if isinstance(value, Mapping):
        wrong = [
            f"{where}: the key {key!r} is no string" for key in value if not isinstance(key, str)
        ]
        wrong += [f"{where}: the key {MARK!r} is reserved"] if MARK in value else []
        return wrong + [
            problem
            for key, item in value.items()
            for problem in problems(item, f"{where}[{key!r}]")
        ]
    return [
        f"{where}: a {type(value).__name__} is no JSON value; tensors belong in `tensors`, the "
        "rest in plain types"
    ]


def to_text(value: Any) -> str:
    """Return the text of `value`. Equal values with keys in the same order have equal texts."""
    return json.dumps(_encoded(value), indent=1, allow_nan=False)


def from_text(text: str) -> Any:
    """Return the value of a text that `to_text` has written.

    Raises:
        ValueError: the text is not such JSON.
    """
    return json.loads(text, object_hook=_decoded, parse_constant=_raise_for_constant)


def _encoded(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {MARK: repr(float(value))}
    if isinstance(value, Mapping):
        return {key: _encoded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encoded(item) for item in value]
    return value


def _decoded(value: dict[str, Any]) -> Any:
    return float(value[MARK]) if value.keys() == {MARK} else value


def _raise_for_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
