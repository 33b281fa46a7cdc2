"""The arguments of a save: everything that is wrong with them, in one list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from shoal.train.checkpoint import exact_json
from shoal.train.checkpoint.saved import PRIVATE_NAME


def misuse_of(
    step: int, tensors: Mapping[str, Tensor], info: Mapping[str, Any], private: Mapping[str, Tensor]
) -> list[str]:
    """Return a line for each argument of `save` that is wrong."""
    wrong = []
    if not isinstance(step, int) or step < 0:
        wrong.append(f"step must be a whole number from 0 on; it is {step!r}")
    wrong += exact_json.problems(info, "info")
    entries = [*tensors.items(), *private.items()]
    wrong += [
        f"{name!r} is a {type(value).__name__}, no tensor"
        for name, value in entries
        if not isinstance(value, Tensor)
    ]
    return wrong + [
        f"{name!r}: names of the form rankN/... are for `private`"
        for name in tensors
        if PRIVATE_NAME.match(name)
    ]
