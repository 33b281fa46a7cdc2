"""Checks of the arguments of `shoal.init`, all at once and before ranks connect."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from typing import Any

from shoal.errors import ConfigError

LIMIT = 2**63
PRECISIONS = ("fp32", "fp64", "bf16", "fp16")


def check_arguments(
    strategy: Any,
    *,
    seed: Any,
    accumulate: Any,
    precision: Any,
    trace: Any,
    draws: Any,
    nonfinite: Any = "skip",
    max_nonfinite: Any = 10,
) -> None:
    """Raise ConfigError with a sentence for each argument that cannot be meant."""
    problems = list(_problems(strategy, seed, accumulate, precision, trace, draws))
    problems += _nonfinite_problems(nonfinite, max_nonfinite)
    if problems:
        raise ConfigError(problems)


def integer_from(variable: str, default: int) -> Any:
    """Return an environment variable as an integer, or the default if it is not set.

    Text that is no integer is returned as it is, for `check_arguments`.
    """
    text = os.environ.get(variable)
    if text is None:
        return default
    return int(text) if text.lstrip("-").isdecimal() else text


def _problems(
    strategy: Any, seed: Any, accumulate: Any, precision: Any, trace: Any, draws: Any
) -> Iterator[str]:
    if not isinstance(strategy, str):
        yield f'strategy: {strategy!r} is no text such as "ddp" or "tensor=2,zero1"'
    if isinstance(seed, bool) or not isinstance(seed, int):
        yield f"seed: {seed!r} is no integer"
    elif abs(seed) >= LIMIT:
        yield f"seed: {seed} must be below 2^63"
    if isinstance(accumulate, bool) or not isinstance(accumulate, int):
        yield f"accumulate: {accumulate!r} is no integer"
    elif not 0 < accumulate < LIMIT:
        yield f"accumulate: {accumulate} must be greater than 0, and below 2^63"
    if precision not in PRECISIONS:
        close = difflib.get_close_matches(str(precision), PRECISIONS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        yield f"precision: {precision!r} is none of {', '.join(PRECISIONS)}{hint}"
    if trace is not None and not isinstance(trace, str):
        yield f'trace: {trace!r} is no text such as "3@20"'
    if draws not in ("rank", "global"):
        yield f'draws: {draws!r} must be "rank" or "global"'


def _nonfinite_problems(nonfinite: Any, max_nonfinite: Any) -> Iterator[str]:
    if nonfinite not in ("skip", "stop", "ignore"):
        yield f'nonfinite: {nonfinite!r} must be "skip", "stop" or "ignore"'
    if isinstance(max_nonfinite, bool) or not isinstance(max_nonfinite, int):
        yield f"max_nonfinite: {max_nonfinite!r} is no integer"
    elif max_nonfinite < 1:
        yield f"max_nonfinite: {max_nonfinite} must be greater than 0"
