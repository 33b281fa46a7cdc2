"""The program `shoal`: its verbs, and what becomes of errors."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn, Protocol

from shoal import __version__
from shoal.cli import (
    config,
    doctor,
    evaluate,
    export,
    import_weights,
    job_options,
    launch,
    plan_tensor,
    plot,
    replay,
    scale,
    schedule,
    servers,
    trace,
    trace_flag,
    train,
    verify,
)
from shoal.errors import ConfigError, EnvironmentConflict, ShoalError, UsageError, did_you_mean

EPILOG = f"""\
{job_options.SETTINGS}
`shoal VERB --help` has the options of a verb, and examples.

  shoal train digits -n 2                       a built-in experiment on two processes
  shoal train my.yaml --train.batch_size 512    a file of your own
  shoal launch -n 4 train.py                    your own script
  shoal train digits -n 2 --trace               where does a step's time go? then: shoal trace runs/digits
  shoal scale runs/digits 4                     four processes from now on, while it trains
"""


class Verb(Protocol):
    """The module of a verb: HELP is one line, EXAMPLES ends what `shoal VERB --help` prints."""

    HELP: str
    EXAMPLES: str

    def arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, options: argparse.Namespace) -> int: ...


VERBS: dict[str, Verb] = {
    "train": train,
    "import": import_weights,
    "replay": replay,
    "scale": scale,
    "export": export,
    "config": config,
    "eval": evaluate,
    "verify": verify,
    "plan-tensor": plan_tensor,
    "plot": plot,
    "trace": trace,
    "schedule": schedule,
    "launch": launch,
    "servers": servers,
    "doctor": doctor,
}
TAKES_SETTINGS = ("train", "import", "config", "verify", "plan-tensor")


class Parser(argparse.ArgumentParser):
    """argparse that says what is wrong in two lines."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        print(f"{self.prog}: error: {message}", file=sys.stderr)
        raise SystemExit(2)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one verb and exit with its status: 0, 1 for a failed run, 2 for bad input, 75 for
    'run me again'.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if words and not words[0].startswith("-") and words[0] not in VERBS:
            raise UsageError(f"there is no verb '{words[0]}'; {did_you_mean(words[0], VERBS)}")
        raise SystemExit(_run(words))
    except ShoalError as error:
        print(f"shoal: {error}", file=sys.stderr)
        raise SystemExit(
            2 if isinstance(error, (ConfigError, EnvironmentConflict, UsageError)) else 1
        ) from None
    except BrokenPipeError:
        # `shoal config digits | head` has read enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None


def _run(words: list[str]) -> int:
    parser, of_verbs = _parsers()
    settings: list[tuple[str, str]] = []
    if words and words[0] in TAKES_SETTINGS:
        words, settings = job_options.split(words, of_verbs[words[0]])
    options = parser.parse_args(trace_flag.with_window(words))
    if options.verb is None:
        parser.print_help()
        return 0
    options.settings = settings
    return VERBS[options.verb].run(options)


def _parsers() -> tuple[Parser, dict[str, argparse.ArgumentParser]]:
    """The program's parser, and those of its verbs."""
    layout = argparse.RawDescriptionHelpFormatter
    what = (
        "Train one PyTorch model on many devices, by any strategy, with the numbers of one device."
    )
    parser = Parser(prog="shoal", description=what, epilog=EPILOG, formatter_class=layout)
    parser.add_argument("--version", action="version", version=f"shoal {__version__}")
    added = parser.add_subparsers(dest="verb", metavar="VERB")
    of_verbs: dict[str, argparse.ArgumentParser] = {}
    for name, verb in VERBS.items():
        epilog = f"examples:\n{verb.EXAMPLES}"
        of_verbs[name] = added.add_parser(
            name, help=verb.HELP, description=verb.HELP, epilog=epilog, formatter_class=layout
        )
        verb.arguments(of_verbs[name])
    return parser, of_verbs
