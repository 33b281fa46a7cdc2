"""The one setting for all limits of the watchdog, in seconds; 0 switches it off.

--hang-limit S      of this command
SHOAL_HANG_LIMIT    of all commands of a shell
train.hang_limit_s  of an experiment (shoal train)
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from shoal.errors import UsageError

VARIABLE = "SHOAL_HANG_LIMIT"
DEFAULT_S = 60.0


def chosen_limit_s(
    option: float | None, environment: Mapping[str, str], configured_s: float = DEFAULT_S
) -> float:
    """Return the limit that a command asks for.

    Args:
        option: the value of --hang-limit; None if it is not given.
        environment: with VARIABLE or without.
        configured_s: the limit where neither is there.

    Raises: UsageError: the variable is no number of seconds.
    """
    if option is not None:
        return option
    if not environment.get(VARIABLE):
        return configured_s
    try:
        return seconds(environment[VARIABLE])
    except ValueError as error:
        raise UsageError(f"{VARIABLE}: {error}") from None


def seconds(text: str) -> float:
    """Return a number of seconds. Raises ValueError for a text that is none."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(f"'{text}' is no number of seconds; give 60, or 0 for no limit")
    return value


def limit_of_ranks(environment: Mapping[str, str]) -> float:
    """Return the limit in the variables that a launcher gives to its ranks; 0 for none."""
    return float(environment.get(VARIABLE) or 0)
