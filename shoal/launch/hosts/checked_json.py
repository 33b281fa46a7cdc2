"""Dataclasses from JSON that another process wrote, with their fields' types checked."""

from __future__ import annotations

import math
import types
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from typing import Any, Self, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class CheckedJson:
    """A dataclass that travels as an object of JSON derives from it."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as an object of JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: object) -> Self:
        """Return an instance of an object of JSON.

        Raises:
            ValueError: a field is missing or of another type. Unknown fields are ignored.
        """
        return cls(**_read_fields(cls, document))


def _read_fields(cls: type, document: object) -> dict[str, Any]:
    """Return the arguments of the dataclass `cls` from an object of JSON.

    Fields may be text, numbers, bools, such dataclasses, tuples of one of these, or None too.
    Unknown keys are ignored, so that a later version can add some.

    Raises:
        ValueError: it is no object, or a field is missing or of another type.
    """
    if not isinstance(document, dict):
        raise ValueError(f"{cls.__name__}: no object")
    hints = get_type_hints(cls)
    values = {}
    for field in fields(cls):
        if field.name in document:
            place = f"{cls.__name__}.{field.name}"
            values[field.name] = _read(place, hints[field.name], document[field.name])
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{cls.__name__}: {field.name} is missing")
    return values


def _read(place: str, hint: Any, value: object) -> Any:
    """Return a value of the type `hint`."""
    if isinstance(hint, types.UnionType):
        if value is None and type(None) in get_args(hint):
            return None
        (hint,) = (one for one in get_args(hint) if one is not type(None))
    if get_origin(hint) is tuple and isinstance(value, list | tuple):
        item_hint, _ = get_args(hint)
        return tuple(_read(place, item_hint, item) for item in value)
    if is_dataclass(hint):
        assert isinstance(hint, type)
        return hint(**_read_fields(hint, value))
    if hint is float and type(value) in (int, float):
        value = float(value)  # type: ignore[arg-type]
    # Not isinstance: True is an int. NaN is no JSON, but Python's reader takes it.
    if type(value) is hint and not (type(value) is float and not math.isfinite(value)):
        return value
    raise ValueError(f"{place}: {value!r} is not of the right type")
