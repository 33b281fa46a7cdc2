"""The answer of a verb: text, or with --json one object of the same form for all verbs.

    {"shoal": "0.1.0", "verb": "export", "ok": true, "result": {...}}
    {"shoal": "0.1.0", "verb": "export", "ok": false, "errors": ["..."]}

`ok` is true where the exit status is 0. With --json nothing else goes to stdout.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from shoal.errors import ConfigError, UsageError, printable
from shoal.train.console import envelope

JSON_HELP = "print one JSON object"


class WrongOptions(UsageError):
    """Words that are no options of the verb, which the message begins with."""


def tell_start(what: str) -> None:
    """Tell a person what takes the next seconds: nothing is printed where stderr is no terminal."""
    if sys.stderr.isatty():
        print(f"shoal: {what} ...", file=sys.stderr)


@contextmanager
def only_json() -> Iterator[None]:
    """Send to stderr what this process and its children print meanwhile: stdout is for the JSON."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def show(options: argparse.Namespace, result: Any, text: object, status: int = 0) -> int:
    """Print the answer of a verb, and return the exit status.

    Args:
        options: of the command.
        result: what --json prints, of JSON values.
        text: what is printed without it.
    """
    print(envelope(options.verb, status == 0, result=result) if options.json else text)
    return status


def show_error(verb: str, as_json: bool, error: Exception | str) -> None:
    """Print why a verb has failed: to stderr, or to stdout as JSON."""
    if as_json:
        problems = error.problems if isinstance(error, ConfigError) else [str(error)]
        print(envelope(verb, False, errors=list(map(printable, problems))))
    else:
        prefix = "" if isinstance(error, WrongOptions) else "shoal: "
        print(f"{prefix}{printable(str(error))}", file=sys.stderr)
