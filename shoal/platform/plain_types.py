"""The types of settings in words, for messages."""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

UNIONS = (UnionType, Union)
"""Origins of X | Y: Python 3.11 makes a `Union` of a type and a Literal."""
LISTS = (tuple, list, Sequence)
WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    NoneType: "none",
}


def describe(annotation: Any) -> str:
    """Return the words for the values of a type, such as "a whole number or none"."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in UNIONS:
        *first, last = (describe(each).removeprefix("one of ") for each in arguments)
        return f"{', '.join(first)} or {last}"
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin in LISTS:
        item = describe(arguments[0]).removeprefix("a ")
        # "a list of whole numbers", but "a list of text"
        return f"a list of {item}{'s' if item.endswith('number') else ''}"
    return "a mapping" if origin is dict else WORDS[annotation]
