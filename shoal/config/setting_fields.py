"""Fields of the sections of a job, and the checks of single values."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import field
from typing import Any

from shoal.config import trace_window
from shoal.costs.cluster import read_time

Check = tuple[Callable[[Any], bool], str]
"""A predicate of a value, and the sentence for the user where it is False."""
POSITIVE: Check = (lambda v: v > 0, "must be greater than 0")
NOT_NEGATIVE: Check = (lambda v: v >= 0, "must not be negative")
BELOW_ONE: Check = (lambda v: 0 <= v < 1, "must be in [0, 1)")
UP_TO_ONE: Check = (lambda v: 0 <= v <= 1, "must be in [0, 1]")
SEED: Check = (lambda v: 0 <= v < 1 << 63, "must be from 0 to 2^63 - 1")
POSITIVE_OR_AUTO: Check = (lambda v: v == "auto" or v > 0, POSITIVE[1])
STEPS: Check = (trace_window.is_window, trace_window.MEANING)
SIZES: Check = (
    lambda v: len(v) > 0 and all(size > 0 for size in v),
    "must be one or more sizes greater than 0",
)


def is_path(text: str) -> bool:
    """Return True for a path that a file system of today can hold."""
    parts = os.fsencode(text).split(b"/")
    return (
        bool(text.strip())
        and all(character >= " " and character != "\x7f" for character in text)
        and len(os.fsencode(text)) < 1024
        and all(len(part) <= 200 for part in parts)
    )


def _is_time(text: str) -> bool:
    """Return True for a time as cluster files have it."""
    try:
        read_time(text)
    except ValueError:
        return False
    return True


TIME: Check = (_is_time, "must be a time greater than 0, such as 12h, 90min or 600s")
# A relative path that stays below the directory in which it begins.
NAME: Check = (
    lambda text: is_path(text) and text[0] != "/" and ".." not in text.split("/"),
    "must be a name of a directory in runs/: not empty, at most 200 bytes, without control "
    "characters, and not leading out by / or ..",
)
PATH: Check = (
    is_path,
    "must be a path: not empty, at most 1,023 bytes and 200 for each name, without control "
    "characters",
)


def setting(default: Any, help: str, check: Check | None = None) -> Any:
    """Return a field with its help text and, where a type is not enough, a check of its value."""
    metadata = {"help": help, "check": check}
    if default == {}:
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def section(kind: type[Any]) -> Any:
    """Return a field for the settings of a section, whose docstring is their help text."""
    return field(default_factory=kind)
