"""The program `shoal`: its verbs, and its handling of errors."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, Protocol

from shoal import __version__
from shoal.cli import (
    answers,
    calibrate,
    cluster_options,
    completion,
    config,
    doctor,
    evaluate,
    export,
    foreign_flags,
    job_options,
    launch,
    plan,
    plan_tensor,
    plot,
    replay,
    scale,
    schedule,
    servers,
    trace,
    train,
    verify,
)
from shoal.config import trace_window
from shoal.errors import BAD_INPUT, ShoalError, UsageError, did_you_mean
from shoal.launch.failure import cause_of

DESCRIPTION = "Train one PyTorch model on many devices, and get the numbers of one device."


class Verb(Protocol):
    """The module of a verb. HELP is one line; EXAMPLES is the end of `shoal VERB --help`."""

    HELP: str
    EXAMPLES: str

    def arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, options: argparse.Namespace) -> int: ...


VERBS: dict[str, Verb] = {
    "train": train,
    "replay": replay,
    "scale": scale,
    "export": export,
    "config": config,
    "eval": evaluate,
    "verify": verify,
    "plan": plan,
    "calibrate": calibrate,
    "plan-tensor": plan_tensor,
    "plot": plot,
    "trace": trace,
    "schedule": schedule,
    "launch": launch,
    "servers": servers,
    "doctor": doctor,
    "completion": completion,
}
# Verbs that accept settings as flags, such as --optimizer.lr 0.1.
TAKES_SETTINGS = ("train", "config", "verify", "plan", "plan-tensor")
# Verbs that accept a script too, whose own words come after --.
TAKES_SCRIPT = ("verify", "plan")


WITHOUT_ANSWER = ("launch", "completion")
"""Verbs without --json: they run scripts, or print what is no result."""
GROUPS = {
    "Run": ("train", "launch", "verify", "eval"),
    "Look": ("plan", "calibrate", "doctor", "config", "trace", "plot", "completion"),
    "While it trains": ("scale", "servers"),
}
"""Verbs by what they are for; all others are for models."""
EPILOG = """\
  shoal train digits -n 2                       a built-in experiment on two processes
  shoal launch -n 4 --strategy zero3 train.py   your own script
  shoal verify train.py -n 2                    is it right? your own script, unchanged

`shoal VERB --help` has the usual options of a verb, and examples; `--help-all` has every option."""
RARE = {
    *({*cluster_options.NAMES} - {"--slurm"}),
    *("--cfg", "--accumulate", "--hang-limit", "--record", "--restarts"),
    *("--trace-to", "--seq", "--servers", "--recalibrate", "--mtbf", "--save", "--restart"),
}
"""Options that the short help leaves out, with the examples that have one."""
ALL = "--help-all"


class Parser(argparse.ArgumentParser):
    """A parser that says where the options are listed, if a command line is wrong."""

    def error(self, message: str) -> NoReturn:
        raise answers.WrongOptions(
            f"{self.prog}: error: {message}\nthe options: {self.prog} --help"
        )


def is_rare(action: argparse.Action) -> bool:
    """Return True for an option that the short help leaves out."""
    return not RARE.isdisjoint(action.option_strings)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one verb and exit with its status. Always raises SystemExit.

    The status is 0, 1 for a failed run, 2 for bad input, or 75 for "run me again".

    Args:
        arguments: the words after `shoal`; None for those of the command line.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if words and not words[0].startswith("-") and words[0] not in VERBS:
            known = did_you_mean(words[0], VERBS)
            hint = foreign_flags.instead_of_verb(words[0]) or known
            raise UsageError(f"there is no verb '{words[0]}'; {hint}")
        raise SystemExit(_run(words))
    except ShoalError as error:
        if isinstance(cause := cause_of(error), ShoalError):
            error = cause
        answers.show_error(words[0] if words else "", _wants_json(words), error)
        raise SystemExit(2 if isinstance(error, BAD_INPUT) else 1) from None
    except BrokenPipeError:
        # The reader has ended, as in `shoal config digits | head`. Without this, the interpreter
        # would write to the pipe once more at its end, and fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None


def _wants_json(words: list[str]) -> bool:
    """Return True if a command, wrong or right, asks for JSON."""
    own = words[: words.index("--")] if "--" in words else words
    return "--json" in own and words[0] in VERBS.keys() - WITHOUT_ANSWER


def _run(words: list[str]) -> int:
    """Parse the words, run the verb, and return its exit status."""
    parser, verb_parsers = parsers(ALL in words)
    settings: list[tuple[str, str]] = []
    script_arguments: list[str] = []
    typed_words = list(words)
    if words and words[0] in TAKES_SCRIPT and "--" in words:
        end = words.index("--")
        words, script_arguments = words[:end], words[end + 1 :]
    if words and words[0] in TAKES_SETTINGS:
        words, settings = job_options.split(words, verb_parsers[words[0]])
    # Settings are no options of argparse, for their names are known only to the configuration.
    options, unknown = parser.parse_known_args(_with_window(words))
    if unknown:
        _refuse_unknown(unknown, verb_parsers.get(options.verb, parser))
    if options.verb is None:
        parser.print_help()
        return 0
    if options.verb == "launch":  # a script's own --trace stays as it was
        options.arguments = words[len(words) - len(options.arguments) :]
    options.words = typed_words
    options.settings = settings
    options.script_arguments = script_arguments
    return VERBS[options.verb].run(options)


def _refuse_unknown(words: list[str], parser: argparse.ArgumentParser) -> NoReturn:
    """Refuse words that no option takes, in the name of the verb whose parser it is."""
    message = f"unrecognized arguments: {' '.join(words)}"
    if parser.prog == "shoal launch":
        message += f"\nwords of the script stand behind it: shoal launch ... SCRIPT {words[0]}"
    parser.error(message)


def parsers(shows_rare: bool = True) -> tuple[Parser, dict[str, argparse.ArgumentParser]]:
    """Return the program's parser, and those of its verbs by name.

    Args: shows_rare: help has the options that the short help leaves out.
    """
    formatter = argparse.RawDescriptionHelpFormatter  # keeps the line breaks of the examples
    parser = Parser(
        prog="shoal",
        usage="shoal VERB ...",
        description=f"{DESCRIPTION}\n\n{_listed_verbs()}",
        epilog=EPILOG,
        formatter_class=formatter,
    )
    parser.add_argument("--version", action="version", version=f"shoal {__version__}")
    parser.add_argument(ALL, action="help", help=argparse.SUPPRESS)
    subparsers = parser.add_subparsers(
        dest="verb", metavar="VERB", help=argparse.SUPPRESS, prog="shoal"
    )
    verb_parsers: dict[str, argparse.ArgumentParser] = {}
    for name, verb in VERBS.items():
        epilog = f"examples:\n{verb.EXAMPLES}"
        parser_of_verb = verb_parsers[name] = subparsers.add_parser(
            name, description=verb.HELP, epilog=epilog, formatter_class=formatter
        )
        verb.arguments(parser_of_verb)
        if name not in WITHOUT_ANSWER:
            parser_of_verb.add_argument("--json", action="store_true", help=answers.JSON_HELP)
        if any("-n" in action.option_strings for action in parser_of_verb._actions):
            foreign_flags.arguments(parser_of_verb)
        is_long = any(is_rare(action) for action in parser_of_verb._actions)
        help = "every option" if is_long else argparse.SUPPRESS
        parser_of_verb.add_argument(ALL, action="help", help=help)
        if is_long and not shows_rare:
            _shorten(parser_of_verb, verb.EXAMPLES)
    return parser, verb_parsers


def _shorten(parser: argparse.ArgumentParser, examples: str) -> None:
    """Leave the rare options and their examples out of the help of a verb."""
    for action in parser._actions:
        if is_rare(action):
            action.help = argparse.SUPPRESS
    usage = re.sub(r"\[-[^]]*\]", "", parser.format_usage()).split()  # "usage:", program and verb
    parser.usage = " ".join([*usage[1:3], "[options]", *usage[3:]])
    shown = [line for line in examples.splitlines(True) if RARE.isdisjoint(line.split())]
    parser.epilog = f"examples:\n{''.join(shown)}"


def _listed_verbs() -> str:
    """Return the verbs in groups, one a line."""
    named = {name for names in GROUPS.values() for name in names}
    groups = GROUPS | {"Models": tuple(name for name in VERBS if name not in named)}
    return "\n".join(
        f"{title}:\n" + "\n".join(f"    {name:<12} {VERBS[name].HELP}" for name in names)
        for title, names in groups.items()
    )


def _with_window(words: list[str]) -> list[str]:
    """Return the words, with a value for each `--trace` that has none.

    argparse would take the next word as the value, which may be an experiment or a script. So a
    word is the value only if it begins with a digit and is no file.
    """

    def is_bare(word: str, following: str) -> bool:
        return word == "--trace" and not (
            following[:1].isdecimal() and not Path(following).exists()
        )

    if words[:1] not in (["train"], ["launch"]):
        return words
    return [
        f"--trace={trace_window.DEFAULT}" if is_bare(word, following) else word
        for word, following in zip(words, [*words[1:], ""], strict=True)
    ]
