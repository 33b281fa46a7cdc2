"""Conversion of a written value to the type of its setting."""

from __future__ import annotations

from difflib import get_close_matches
from math import isfinite
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

from shoal.config.fields import Setting
from shoal.config.yaml_subset import LocatedValue, write

MAX_INTEGER = 2**63 - 1
TYPES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def convert(located: LocatedValue, setting: Setting) -> Any:
    """Return the value as the setting's type, within the setting's limits.

    A whole number may be written as `1e3`, and a number as a whole number; a bool is neither. In
    place of a list one value is enough. `none` is a value of the settings that may be None.

    Raises:
        ValueError: a sentence that continues the setting's name: the requirement and the value.
    """
    value = typed(located, setting.annotation)
    if setting.check is not None and value is not None:
        is_valid, requirement = setting.check
        if not is_valid(value):
            raise ValueError(f"{requirement}, not {write(value)}")
    return value


def typed(located: LocatedValue, annotation: Any) -> Any:
    """Return the value as a type.

    Args:
        annotation: bool, int, float, str, a Literal of str, tuple[X, ...], dict or X | None.

    Raises:
        ValueError: as `convert` does.
    """
    if isinstance(annotation, UnionType):
        return None if located.value is None else typed(located, _without_none(annotation))
    if get_origin(annotation) is Literal:
        return _choice(located, get_args(annotation))
    if get_origin(annotation) is tuple:
        items = located.value if isinstance(located.value, list) else [located]
        return tuple(typed(item, get_args(annotation)[0]) for item in items)
    if get_origin(annotation) is dict and isinstance(located.value, dict):
        return located.plain()
    return _scalar(located, annotation)


def _scalar(located: LocatedValue, annotation: Any) -> bool | int | float | str:
    """Return a bool, int, float or str. Raises ValueError where another type was written."""
    value = located.value
    # As text the value is used as it was written: `name: 007` is not "7".
    if annotation is str and located.text and value is not None:
        return located.text
    if annotation is float and type(value) in (int, float) and isfinite(value):
        return float(value)
    if annotation is int and type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is annotation and annotation in (bool, int, str):
        scalar: bool | int | str = value
        if annotation is int and not -MAX_INTEGER <= value <= MAX_INTEGER:
            raise ValueError("must be a whole number below 2^63")
        return scalar
    raise ValueError(f"must be {describe(annotation)}, not {write(located.plain())}")


def describe(annotation: Any) -> str:
    """Return the words for the values of a type, such as "a whole number or none"."""
    if isinstance(annotation, UnionType):
        return f"{describe(_without_none(annotation))} or none"
    if get_origin(annotation) is Literal:
        return f"one of {', '.join(get_args(annotation))}"
    if get_origin(annotation) is tuple:
        item = describe(get_args(annotation)[0]).removeprefix("a ")
        # "a list of whole numbers", but "a list of text"
        return f"a list of {item}{'s' if item.endswith('number') else ''}"
    if get_origin(annotation) is dict:
        return "a mapping"
    return TYPES[annotation]


def _choice(located: LocatedValue, choices: tuple[str, ...]) -> str:
    # The text, because a choice such as `no` or `1e3` may have been parsed to another type.
    if located.text in choices:
        return located.text
    close = get_close_matches(located.text, choices, n=1)
    hint = f"; did you mean '{close[0]}'?" if close else ""
    raise ValueError(f"must be one of {', '.join(choices)}, not {write(located.plain())}{hint}")


def _without_none(annotation: UnionType) -> Any:
    """Return X for X | None."""
    (only,) = (argument for argument in get_args(annotation) if argument is not NoneType)
    return only
