"""Environment variables, read so that all problems can be reported at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")


class Variables:
    """The variables of a launcher. A missing or malformed value adds a sentence to `problems`.

    Reading goes on after a problem, with None or 0 in place of the value. A caller must look at
    `problems` before it relies on what it has read.

    Args:
        environ: the variables; an empty value counts as not set.
        parent_pid: process id of this process's parent.
    """

    def __init__(self, environ: Mapping[str, str], parent_pid: int) -> None:
        self.parent_pid = parent_pid
        self.environ = {name: value for name, value in environ.items() if value}
        self.problems: list[str] = []

    def has(self, *names: str) -> bool:
        """Return True if at least one of `names` is set."""
        return any(name in self.environ for name in names)

    def text(self, *names: str) -> str | None:
        """Return the value of the first of `names` that is set; None if none is."""
        return next((self.environ[name] for name in names if name in self.environ), None)

    def number(self, *names: str) -> int | None:
        """Return the first of `names` that is set, as an integer >= 0; None if none is set.

        A value that is no such integer is a problem, and gives None too.
        """
        name = next((name for name in names if name in self.environ), None)
        if name is None:
            return None
        value = self.environ[name]
        # isdigit alone accepts digits such as a superscript two, which int() refuses.
        if value.isascii() and value.isdigit():
            return int(value)
        self.problems.append(f"{name}={value} is not a whole number of 0 or more.")
        return None

    def required_number(self, *names: str) -> int:
        """Return the same as `number`, but 0 and a problem where none of `names` is set."""
        if not self.has(*names):
            self.problems.append(f"{names[0]} is missing.")
        return self.number(*names) or 0

    def required(self, name: str, read: Callable[[str], T]) -> T | None:
        """Return `read(value)` of one variable.

        It is None, with a problem, where the variable is missing or `read` raises ValueError.
        """
        if not self.has(name):
            self.problems.append(f"{name} is missing.")
            return None
        try:
            return read(self.environ[name])
        except ValueError as error:
            self.problems.append(f"{name}: {error}.")
            return None
