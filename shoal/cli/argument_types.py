"""Types of arguments, which refuse what no file system and no machine has."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any, NoReturn

from shoal.config.job import PATH, is_path
from shoal.errors import UsageError
from shoal.watchdog import hang_limit

MAX_PROCESSES = 1024
"""Limit of one machine. More are a slip of the finger, and end the machine before they are seen."""


def path(text: str) -> Path:
    """Return an argument as a path. Raises ArgumentTypeError."""
    if not is_path(text):
        raise argparse.ArgumentTypeError(PATH[1])
    return Path(text)


def integer(low: int, high: int = 2**63 - 1) -> Callable[[str], int]:
    """Return a type of whole numbers from `low` to `high`, written in digits."""

    def parse(text: str) -> int:
        digits = text.removeprefix("-")
        if not (digits.isascii() and digits.isdecimal()):
            raise argparse.ArgumentTypeError(f"'{text}' is no whole number")
        # Compared by length first: Python refuses to convert thousands of digits.
        value = int(text) if len(digits) < 30 else high + 1
        if not low <= value <= high:
            limit = f"at least {low}, below 2^63" if high == 2**63 - 1 else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"{text} must be {limit}")
        return value

    return parse


processes = integer(1, MAX_PROCESSES)


def processes_argument(parser: argparse.ArgumentParser, help: str) -> None:
    """Add -n."""
    parser.add_argument("-n", "--processes", type=processes, metavar="N", help=help)


def quantity(read: Callable[[str], float], hint: str = "") -> Callable[[str], float]:
    """Return a type of numbers. Args: read: raises ValueError; hint: ends what that says."""

    def parse(text: str) -> float:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{error}{hint}") from None

    return parse


seconds = quantity(hang_limit.seconds)


def tolerance(text: str) -> float:
    """Return a finite number that is not negative. Raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < inf:
        raise argparse.ArgumentTypeError(f"'{text}' must be a number of at least 0")
    return value


def checkpoint_argument(parser: argparse.ArgumentParser) -> None:
    """Add --checkpoint, which chooses one of a run."""
    parser.add_argument(
        "--checkpoint",
        type=_checkpoint,
        default="latest",
        metavar="N",
        help="step of the checkpoint, or latest or best (default: latest)",
    )


def _checkpoint(text: str) -> str | int:
    if text in ("latest", "best"):
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is no step, and neither latest nor best")
    return integer(0)(text)


def answer_option(parser: Any, *names: str, sentence: str) -> None:
    """Answer an option of another program, or of former days, by what to do. Help leaves it out."""
    parser.add_argument(
        *names, action=OptionInstead, nargs="?", const=sentence, help=argparse.SUPPRESS
    )


class OptionInstead(argparse.Action):
    """An option of another program. Its `const` says what to do."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> NoReturn:
        raise UsageError(f"{option_string}: {self.const}")
