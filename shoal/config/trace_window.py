"""The steps that a run traces: `3@20` is three steps, after the first twenty of a process."""

from __future__ import annotations

import re
from typing import NamedTuple

from shoal.errors import ConfigError

DEFAULT = "3@12"
MEANING = (
    "must be N or N@S: N steps (1 to 100), after the first S that this start of the run takes; "
    "3@20, say"
)
MAX_STEPS = 100


class Window(NamedTuple):
    """The steps to trace.

    Args:
        steps: the number of steps that are traced.
        after: the steps before them, in which the process warms up.
    """

    steps: int
    after: int


def is_window(text: str) -> bool:
    """Return True if `parse_window` accepts the text."""
    match = re.fullmatch(r"(\d{1,3})(?:@(\d{1,12}))?", text, re.ASCII)
    return match is not None and 1 <= int(match[1]) <= MAX_STEPS


def parse_window(text: str, origin: str) -> Window:
    """Return the window of a text. Without `@S` it has the `S` of `DEFAULT`.

    Args:
        origin: the flag or parameter, for the error.

    Raises:
        ConfigError: the text is no window.
    """
    if not is_window(text):
        raise ConfigError(f"{origin}: '{text}' {MEANING}")
    steps, _, after = text.partition("@")
    return Window(int(steps), int(after or DEFAULT.partition("@")[2]))
