"""From a value as it was written to the type that a setting has."""

from __future__ import annotations

from difflib import get_close_matches
from math import isfinite
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

from shoal.config.fields import Setting
from shoal.config.yaml_subset import LocatedValue, write

TYPES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def convert(placed: LocatedValue, setting: Setting) -> Any:
    """The value, of the setting's type and within its limits.

    Whole numbers may be written as `1e3`; a number may be a whole number; a bool is neither. A list
    that is asked for may be one value alone. `none` clears what may be none.

    Raises: ValueError: what the value must be and what it is, to stand behind the setting's name.
    """
    value = typed(placed, setting.annotation)
    if setting.check is not None and value is not None:
        holds, requirement = setting.check
        if not holds(value):
            raise ValueError(f"{requirement}, not {write(value)}")
    return value


def typed(placed: LocatedValue, annotation: Any) -> Any:
    """The value as the annotation wants it: bool, int, float, str, a Literal of str, tuple[X, ...], dict or X | None.

    Raises: ValueError: as `convert` does.
    """
    if isinstance(annotation, UnionType):
        return None if placed.value is None else typed(placed, _without_none(annotation))
    if get_origin(annotation) is Literal:
        return _choice(placed, get_args(annotation))
    if get_origin(annotation) is tuple:
        items = placed.value if isinstance(placed.value, list) else [placed]
        return tuple(typed(item, get_args(annotation)[0]) for item in items)
    if get_origin(annotation) is dict and isinstance(placed.value, dict):
        return placed.plain()
    return _scalar(placed, annotation)


def _scalar(placed: LocatedValue, annotation: Any) -> bool | int | float | str:
    """A bool, int, float or str. Raises ValueError: anything else, or another type was written."""
    value = placed.value
    if annotation is str and placed.text and value is not None:
        return placed.text
    if annotation is float and type(value) in (int, float) and isfinite(value):
        return float(value)
    if annotation is int and type(value) is float and value.is_integer():
        return int(value)
    if type(value) is annotation and annotation in (bool, int, str):
        found: bool | int | str = value
        return found
    raise ValueError(f"must be {describe(annotation)}, not {write(placed.plain())}")


def describe(annotation: Any) -> str:
    """What may be written for a value of this type, in words."""
    if isinstance(annotation, UnionType):
        return f"{describe(_without_none(annotation))} or none"
    if get_origin(annotation) is Literal:
        return f"one of {', '.join(get_args(annotation))}"
    if get_origin(annotation) is tuple:
        # "a list of whole numbers", "a list of text"
        item = describe(get_args(annotation)[0])
        return f"a list of {item.removeprefix('a ')}{'s' if item.endswith('number') else ''}"
    if get_origin(annotation) is dict:
        return "a mapping"
    return TYPES[annotation]


def _choice(placed: LocatedValue, choices: tuple[str, ...]) -> str:
    if placed.text in choices:
        return placed.text
    hint = (
        f"; did you mean '{close[0]}'?"
        if (close := get_close_matches(placed.text, choices, n=1))
        else ""
    )
    raise ValueError(f"must be one of {', '.join(choices)}, not {write(placed.plain())}{hint}")


def _without_none(annotation: UnionType) -> Any:
    (only,) = (argument for argument in get_args(annotation) if argument is not NoneType)
    return only
