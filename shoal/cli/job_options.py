"""The experiment of a command line: the arguments that choose it, and its settings."""

from __future__ import annotations

import argparse
import ast
import re
import tokenize
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli import argument_types
from shoal.config import trace_window
from shoal.config.fields import all_settings
from shoal.config.job import is_path
from shoal.config.yaml_subset import write
from shoal.errors import ConfigError, UsageError
from shoal.train.console import warn

if TYPE_CHECKING:
    from shoal.config import Settings
    from shoal.strategies import StrategyLine

WITHOUT_DASHES = re.compile(r"[a-z_]+(\.\w+)*")
"""The name of a setting without dashes, as in `train.epochs=3`, which other programs accept."""
AUTO = "auto"
"""The strategy that `shoal plan` would take."""
SETTINGS = """\
Any setting can be given by its dotted name, e.g. --optimizer.lr 0.1 --train.epochs 5 --seed 3;
`shoal config NAME --explain` lists them all with their meaning, value and origin."""
METAVARS = {"strategy": "LINE", "out": "DIR"}
"""Settings that the help of a verb may name, each with the placeholder of its value."""


def arguments(
    parser: argparse.ArgumentParser,
    processes: str = "processes on this machine (default: 1)",
    shown: Sequence[str] = ("strategy",),
    source: str = "built-in experiment, or a YAML file",
) -> None:
    """Add the arguments that choose an experiment.

    Args:
        parser: the parser of a verb.
        processes: the help of -n.
        shown: settings that the help names.
        source: the help of what names the experiment.
    """
    argument_types.processes_argument(parser, processes)
    parser.add_argument("source", nargs="*", metavar="NAME_OR_YAML", help=source)
    parser.add_argument(
        "--cfg",
        type=argument_types.path,
        help="a distribuuuu YAML file; KEY VALUE pairs may follow",
    )
    parser.add_argument(
        "--plugin",
        dest="plugins",
        action="append",
        default=[],
        metavar="FILE",
        help="take models and data sets from this Python file",
    )
    argument_types.answer_option(parser, "--import", sentence="it is --plugin FILE")
    group = parser.add_argument_group("settings", SETTINGS)
    for name in shown:
        setting = all_settings()[name]
        default = "" if setting.default is None else f" (default: {write(setting.default)})"
        group.add_argument(f"--{name}", metavar=METAVARS[name], help=setting.help + default)


def hang_limit_argument(parser: argparse.ArgumentParser, effect: str) -> None:
    """Add --hang-limit; `effect` begins its help."""
    parser.add_argument(
        "--hang-limit",
        type=argument_types.seconds,
        metavar="SECONDS",
        help=f"{effect} if a rank shows no progress for this long (default: 60; 0 for no limit)",
    )


def trace_argument(parser: argparse.ArgumentParser) -> None:
    """Add --trace, whose value may be left out; see `program`."""
    parser.add_argument(
        "--trace",
        metavar="N@S",
        help=f"trace N steps after S of this start (alone: {trace_window.DEFAULT})",
    )


def split(
    words: list[str], parser: argparse.ArgumentParser
) -> tuple[list[str], list[tuple[str, str]]]:
    """Split the words into those of the parser and the settings.

    A setting is `--dotted.name value` or `--dotted.name=value`.

    Returns:
        The words for the parser, and pairs of dotted name and text.

    Raises:
        ConfigError: a setting has no value, or no dashes.
    """
    parser_options = {name for action in parser._actions for name in action.option_strings}
    parser_options -= {f"--{name}" for name in METAVARS}  # the parser has these for its help only
    parser_words: list[str] = []
    settings: list[tuple[str, str]] = []
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        name, equals, value = word.partition("=")
        if not name.startswith("--") or name in parser_options:
            if "--cfg" not in words:  # otherwise it may be a value of distribuuuu's KEY VALUE pairs
                _check_has_dashes(word)
            parser_words.append(word)
            continue
        if not equals:
            if not remaining:
                raise ConfigError(f"flag {name}: a value is missing")
            value = remaining.pop(0)
        settings.append((name.removeprefix("--"), value))
    return parser_words, settings


def _check_has_dashes(word: str) -> None:
    """Raise ConfigError for `train.epochs=3`, unless there is a file of that name."""
    name, equals, _ = word.partition("=")
    if equals and WITHOUT_DASHES.fullmatch(name) and not Path(word).exists():
        raise ConfigError(f"'{word}': a setting begins with two dashes: --{word}")


def settings(
    options: argparse.Namespace, ranks: int, note: Callable[[str], None] = warn
) -> tuple[Settings, StrategyLine]:
    """Return the job of a command line and its strategies.

    Args:
        options: the parsed arguments, with the settings of `split` in `options.settings`.
        ranks: the number of ranks that will train.
        note: prints what differs from what a reader may expect.
    """
    from shoal.strategies import parse_line

    read, notes = _read_settings(options, ranks, list(options.settings))
    if read.job.strategy == AUTO:
        from shoal.planner.auto_strategy import choose

        chosen, reason = choose(read.job, ranks)
        options.settings = [*options.settings, ("strategy", chosen)]
        read, notes = _read_settings(options, ranks, list(options.settings))
        notes.append(reason)
    for text in notes:
        note(text)
    return read, parse_line(read.job.strategy)


def script_strategy(options: argparse.Namespace) -> str | None:
    """Return the strategies that a command for a script names; None if it names none.

    Raises:
        ConfigError: there is no such strategy.
        UsageError: the script is no Python file, or there is another setting.
    """
    from shoal.strategies import parse_line

    script, given = options.source[0], dict(options.settings)
    strategy = given.pop("strategy", None)
    for name in given:
        raise UsageError(
            f"--{name}: no option of `shoal {options.verb}` for a script. The script's own words "
            f"come after --: shoal {options.verb} {script} -- --{name} ..."
        )
    if not is_path(script) or not Path(script).is_file():
        raise UsageError(
            f"{options.verb}: there is no script {script}. Give the path of a Python file."
        )
    try:
        with tokenize.open(script) as file:
            ast.parse(file.read(), script)
    except (SyntaxError, ValueError, RecursionError, OSError) as error:
        raise UsageError(f"{options.verb}: {script} is no Python file: {error}") from error
    return None if strategy is None else parse_line(strategy).text


def _read_settings(
    options: argparse.Namespace, ranks: int, flags: list[tuple[str, str]]
) -> tuple[Settings, list[str]]:
    from shoal import config

    if options.plugins:
        flags += [("plugin", str(Path(file).resolve())) for file in options.plugins]
    if options.cfg is not None:
        return config.translate(options.cfg, options.source, ranks, flags)
    if len(options.source) != 1:
        given = "there is none"
        if options.source:
            given = f"there are {len(options.source)}: {' '.join(options.source)}"
        raise UsageError(
            f"one NAME_OR_YAML is needed; {given}. Built in: {', '.join(config.builtin_names())}"
        )
    if options.source[0].endswith(".py"):
        raise UsageError(
            f"{options.source[0]} is a script, and this takes an experiment. A script of your own: "
            f"shoal launch -n 2 {options.source[0]}"
        )
    return config.read(options.source[0], flags), []
