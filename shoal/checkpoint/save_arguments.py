"""The arguments of a save: everything that is wrong with them, in one list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from shoal.checkpoint.saved import PRIVATE_NAME
from shoal.checkpoint.shard_format import RESERVED_NAME


def misuse_of(
    step: int, tensors: Mapping[str, Tensor], info: Mapping[str, Any], private: Mapping[str, Tensor]
) -> list[str]:
    """Return a line for each argument of `save` that is wrong."""
    wrong = []
    if not isinstance(step, int) or step < 0:
        wrong.append(f"step must be a whole number from 0 on; it is {step!r}")
    wrong += info_problems(info, "info")
    entries = [*tensors.items(), *private.items()]
    wrong += [
        f"{name!r} is a {type(value).__name__}, no tensor"
        for name, value in entries
        if not isinstance(value, Tensor)
    ]
    wrong += [f"{name!r}: this name is reserved" for name, _ in entries if name == RESERVED_NAME]
    return wrong + [
        f"{name!r}: names of the form rankN/... are for `private`"
        for name in tensors
        if PRIVATE_NAME.match(name)
    ]


def info_problems(value: Any, where: str) -> list[str]:
    """Return a line for each part of `value` that would not be read back equal from JSON.

    Tuples are read as lists.

    Args:
        where: the path to `value`, with which each line begins.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return []
    if isinstance(value, list | tuple):
        return [
            problem
            for i, item in enumerate(value)
            for problem in info_problems(item, f"{where}[{i}]")
        ]
    if isinstance(value, Mapping):
        wrong = [
            f"{where}: the key {key!r} is no string" for key in value if not isinstance(key, str)
        ]
        return wrong + [
            problem
            for key, item in value.items()
            for problem in info_problems(item, f"{where}[{key!r}]")
        ]
    return [
        f"{where}: a {type(value).__name__} is no JSON value; tensors belong in `tensors`, the "
        "rest in plain types"
    ]
