"""Environment variables read with every complaint kept, so that all can be reported at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")


class Variables:
    """A launcher's variables. A value that is missing or malformed is noted in `problems`, and
    reading goes on.

    Args:
        environ: variables; an empty one counts as not set.
        parent_pid: this process's parent.
    """

    def __init__(self, environ: Mapping[str, str], parent_pid: int) -> None:
        self.parent_pid = parent_pid
        self.environ = {name: value for name, value in environ.items() if value}
        self.problems: list[str] = []

    def has(self, *names: str) -> bool:
        """Whether any of these is set."""
        return any(name in self.environ for name in names)

    def text(self, *names: str) -> str | None:
        """The first of these that is set."""
        return next((self.environ[name] for name in names if name in self.environ), None)

    def number(self, *names: str) -> int | None:
        """The first of these that is set, as a number >= 0; None, and a problem, where it is
        not one.
        """
        name = next((name for name in names if name in self.environ), None)
        if name is None:
            return None
        value = self.environ[name]
        if value.isascii() and value.isdigit():
            return int(value)
        self.problems.append(f"{name}={value} is not a whole number of 0 or more.")
        return None

    def needed_number(self, *names: str) -> int:
        """As `number`, but 0, and a problem, where none of them is set."""
        if not self.has(*names):
            self.problems.append(f"{names[0]} is missing.")
        return self.number(*names) or 0

    def needed(self, name: str, read: Callable[[str], T]) -> T | None:
        """What `read` makes of this variable; None, and a problem, where it is missing or
        `read` raises ValueError.
        """
        if not self.has(name):
            self.problems.append(f"{name} is missing.")
            return None
        try:
            return read(self.environ[name])
        except ValueError as error:
            self.problems.append(f"{name}: {error}.")
            return None
