"""Checks of the arguments of `shoal.verify`, before any process starts."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

from shoal.errors import UsageError

MOST_RANKS = 1 << 10
"""Processes of one machine that a proof may start."""


def check_arguments(
    functions: Mapping[str, Any], counts: Mapping[str, Any], strategy: Any, tolerance: Any
) -> None:
    """Raise UsageError with a sentence for each argument that cannot be meant.

    Args:
        functions: each is to stand at the top of a module.
        counts: integers; `verify_job` refuses those below 1.
    """
    problems = list(_problems(functions, counts, strategy, tolerance))
    if problems:
        raise UsageError("\n".join(problems))


def _problems(
    functions: Mapping[str, Any], counts: Mapping[str, Any], strategy: Any, tolerance: Any
) -> Iterator[str]:
    for name, function in functions.items():
        if not callable(function):
            yield f"{name}: {function!r} is no function"
        elif not _can_be_sent(function):
            yield (
                f"{name}: {function!r} must be a function at the top of a module, from which "
                "every process imports it"
            )
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int):
            yield f"{name}: {count!r} is no integer"
        elif name == "ranks" and count > MOST_RANKS:
            yield f"{name}={count}: it must be at most {MOST_RANKS:,}, which are processes here"
    if not isinstance(strategy, str):
        yield f'strategy: {strategy!r} is no text such as "ddp" or "tensor=2,zero1"'
    is_number = isinstance(tolerance, int | float) and not isinstance(tolerance, bool)
    if not is_number or not math.isfinite(tolerance) or tolerance < 0:
        yield f"tolerance: {tolerance!r} is no number from 0 on, such as 1e-10"


def _can_be_sent(function: Any) -> bool:
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True
