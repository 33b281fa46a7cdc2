"""The program `shoal`: its verbs, and its handling of errors."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn, Protocol

from shoal import __version__
from shoal.cli import (
    agent,
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
from shoal.errors import BAD_INPUT, ShoalError, UsageError, did_you_mean, printable

EPILOG = f"""\
{job_options.SETTINGS}
`shoal VERB --help` has the options of a verb, and examples.

  shoal train digits -n 2                       a built-in experiment on two processes
  shoal train my.yaml --train.batch_size 512    a file of your own
  shoal launch -n 4 train.py                    your own script
  shoal train digits -n 2 --trace               the time of a step: shoal trace runs/digits
  shoal scale runs/digits 4                     four processes from now on, while it trains
"""


class Verb(Protocol):
    """The module of a verb. HELP is one line; EXAMPLES is the end of `shoal VERB --help`."""

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
    "agent": agent,
    "doctor": doctor,
}
# Verbs that accept settings as flags, such as --optimizer.lr 0.1.
TAKES_SETTINGS = ("train", "import", "config", "verify", "plan-tensor")


class Parser(argparse.ArgumentParser):
    """A parser that reports an error in two lines: the usage and the error."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        print(f"{self.prog}: error: {printable(message)}", file=sys.stderr)
        raise SystemExit(2)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one verb and exit with its status. Always raises SystemExit.

    The status is 0, 1 for a failed run, 2 for bad input, or 75 for "run me again".

    Args:
        arguments: the words after `shoal`; None for those of the command line.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if words and not words[0].startswith("-") and words[0] not in VERBS:
            raise UsageError(f"there is no verb '{words[0]}'; {did_you_mean(words[0], VERBS)}")
        raise SystemExit(_run(words))
    except ShoalError as error:
        print(f"shoal: {printable(str(error))}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, BAD_INPUT) else 1) from None
    except BrokenPipeError:
        # The reader has ended, as in `shoal config digits | head`. Without this, the interpreter
        # would write to the pipe once more at its end, and fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None


def _run(words: list[str]) -> int:
    """Parse the words, run the verb, and return its exit status."""
    parser, verb_parsers = _parsers()
    settings: list[tuple[str, str]] = []
    script_arguments: list[str] = []
    typed_words = list(words)
    if words and words[0] == "verify" and "--" in words:
        end = words.index("--")
        words, script_arguments = words[:end], words[end + 1 :]
    if words and words[0] in TAKES_SETTINGS:
        words, settings = job_options.split(words, verb_parsers[words[0]])
    # Settings are no options of argparse, for their names are known only to the configuration.
    options = parser.parse_args(trace_flag.with_window(words))
    if options.verb is None:
        parser.print_help()
        return 0
    options.words = typed_words
    options.settings = settings
    options.script_arguments = script_arguments
    return VERBS[options.verb].run(options)


def _parsers() -> tuple[Parser, dict[str, argparse.ArgumentParser]]:
    """Return the program's parser, and those of its verbs by name."""
    formatter = argparse.RawDescriptionHelpFormatter  # keeps the line breaks of the examples
    description = (
        "Train one PyTorch model on many devices, by any strategy, with the numbers of one device."
    )
    parser = Parser(prog="shoal", description=description, epilog=EPILOG, formatter_class=formatter)
    parser.add_argument("--version", action="version", version=f"shoal {__version__}")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB")
    verb_parsers: dict[str, argparse.ArgumentParser] = {}
    for name, verb in VERBS.items():
        epilog = f"examples:\n{verb.EXAMPLES}"
        verb_parsers[name] = subparsers.add_parser(
            name, help=verb.HELP, description=verb.HELP, epilog=epilog, formatter_class=formatter
        )
        verb.arguments(verb_parsers[name])
    return parser, verb_parsers
