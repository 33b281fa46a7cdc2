"""Which steps are traced: `3@20` is three steps, after the first twenty that a process takes."""

from __future__ import annotations

import re
from typing import NamedTuple

from shoal.errors import ConfigError

DEFAULT = "3@12"
MEANING = "must be N or N@S: N steps (1 to 100), after the first S that this start of the run takes; 3@20, say"
MOST_STEPS = 100


class Window(NamedTuple):
    """Args: steps: how many are traced. after: how many this process takes before them, to warm
    up.
    """

    steps: int
    after: int


def is_window(text: str) -> bool:
    """Whether `parse` takes it."""
    found = re.fullmatch(r"(\d{1,3})(?:@(\d{1,12}))?", text, re.ASCII)
    return found is not None and 1 <= int(found[1]) <= MOST_STEPS


def parse_window(text: str, where: str) -> Window:
    """Read a window. Raises ConfigError: it is none; `where` it stood."""
    if not is_window(text):
        raise ConfigError([f"{where}: '{text}' {MEANING}"])
    steps, _, after = text.partition("@")
    return Window(int(steps), int(after or DEFAULT.partition("@")[2]))
