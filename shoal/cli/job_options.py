"""The experiment that a command line describes: its arguments, and the settings among its words."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.config.fields import all_settings
from shoal.config.yaml_subset import write
from shoal.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from shoal.config import Settings
    from shoal.strategies import StrategyLine

WITHOUT_DASHES = re.compile(r"[a-z_]+(\.\w+)*")
"""A setting's name as other programs take it, `train.epochs=3`."""
SETTINGS = """\
Any setting can be given by its dotted name, e.g. --optimizer.lr 0.1 --train.epochs 5 --seed 3;
`shoal config NAME --explain` lists them all with their meaning, value and origin."""
METAVARS = {"strategy": "LINE", "out": "DIR"}
"""Settings that a verb's help may name, and the word that stands for their value there."""


def arguments(
    parser: argparse.ArgumentParser,
    processes: str = "processes on this machine (default: 1)",
    shown: Sequence[str] = ("strategy",),
) -> None:
    """Add the arguments that describe an experiment; the help names the settings in `shown`."""
    parser.add_argument("-n", "--processes", type=int, help=processes)
    parser.add_argument(
        "source", nargs="*", metavar="NAME_OR_YAML", help="built-in experiment, or a YAML file"
    )
    allreduce_argument(parser)
    parser.add_argument(
        "--cfg", type=Path, help="a distribuuuu YAML file; KEY VALUE pairs may follow"
    )
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="FILE",
        help="register models, data",
    )
    group = parser.add_argument_group("settings", SETTINGS)
    for name in shown:
        setting = all_settings()[name]
        default = "" if setting.default is None else f" (default: {write(setting.default)})"
        group.add_argument(f"--{name}", metavar=METAVARS[name], help=setting.help + default)


def allreduce_argument(parser: argparse.ArgumentParser, more: str = "") -> None:
    from shoal.comm.algorithms.algorithm_names import CHOICES, NAMES

    help = (
        f"algorithm of ddp: {', '.join(NAMES)}; short for --strategy ddp,allreduce=ALGORITHM{more}"
    )
    parser.add_argument("--allreduce", choices=CHOICES, metavar="ALGORITHM", help=help)


def split(
    words: list[str], parser: argparse.ArgumentParser
) -> tuple[list[str], list[tuple[str, str]]]:
    """Take `--dotted.name value` and `--dotted.name=value` out of the words; the parser sees
    the rest.
    """
    own = {name for action in parser._actions for name in action.option_strings}
    own -= {f"--{name}" for name in METAVARS}  # the parser has them for its help alone
    rest, settings, waiting = [], [], list(words)
    while waiting:
        word = waiting.pop(0)
        name, equals, value = word.partition("=")
        if not name.startswith("--") or name in own:
            if (
                equals
                and "--cfg" not in words
                and WITHOUT_DASHES.fullmatch(name)
                and not Path(word).exists()
            ):
                raise ConfigError([f"'{word}': a setting begins with two dashes: --{word}"])
            rest.append(word)
            continue
        if not equals:
            if not waiting:
                raise ConfigError([f"flag {name}: a value is missing"])
            value = waiting.pop(0)
        settings.append((name.removeprefix("--"), value))
    return rest, settings


def settings(options: argparse.Namespace, ranks: int) -> tuple[Settings, StrategyLine, list[str]]:
    """The job that the words describe, its strategies, and notes to print before it runs."""
    from shoal.strategies import add_allreduce_option, parse_line

    found, notes = _read_settings(options, ranks, list(options.settings))
    line = parse_line(found.job.strategy)
    if options.allreduce is None:
        return found, line, notes
    line = add_allreduce_option(line, options.allreduce)
    found, notes = _read_settings(options, ranks, [*options.settings, ("strategy", line.text)])
    return found, line, notes


def _read_settings(
    options: argparse.Namespace, ranks: int, flags: list[tuple[str, str]]
) -> tuple[Settings, list[str]]:
    from shoal import config

    if options.imports:
        flags += [("import", str(Path(file).resolve())) for file in options.imports]
    if options.cfg is not None:
        return config.translate(options.cfg, options.source, ranks, flags)
    if len(options.source) != 1:
        given = (
            f"there are {len(options.source)}: {' '.join(options.source)}"
            if options.source
            else "there is none"
        )
        raise UsageError(
            f"one NAME_OR_YAML is needed; {given}. Built in: {', '.join(config.builtin_names())}"
        )
    return config.read(options.source[0], flags), []
