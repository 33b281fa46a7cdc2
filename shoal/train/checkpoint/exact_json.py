"""JSON whose numbers come back as they went.

Finite floats are written with `repr`, which is exact. JSON has no word for the others: they are
written as `{"$float": "nan"}`, `"inf"` or `"-inf"`. Tuples come back as lists; nothing else changes
its type on the way, because what would is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

MARK = "$float"


def problems(value: Any, where: str) -> list[str]:
    """What in `value` would not come back equal; one line each, beginning with its place."""
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
    """The one text of `value`: equal values with their keys in the same order have equal texts
    and digests.
    """
    return json.dumps(_encoded(value), indent=1, allow_nan=False)


def from_text(text: str) -> Any:
    """The value back.

    Raises:
        ValueError: the text is not such JSON.
    """
    return json.loads(text, object_hook=_decoded, parse_constant=_refuse)


def _encoded(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {MARK: repr(float(value))}
    if isinstance(value, Mapping):
        return {key: _encoded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encoded(item) for item in value]
    return value


def _decoded(found: dict[str, Any]) -> Any:
    return float(found[MARK]) if found.keys() == {MARK} else found


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
