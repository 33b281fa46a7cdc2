"""The options of `launch` and `train` for Slurm.

Values are read as text here and checked later, so that all problems can be said at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from shoal.cli import argument_types
from shoal.errors import UsageError

VALUES = {
    "nodes": ("N", "machines (default: 1)"),
    "ntasks-per-node": ("N", "ranks on each machine (default: 1)"),
    "cpus-per-task": ("N", "processors of each rank"),
    "time": ("LIMIT", "minutes, HH:MM:SS or D-HH:MM:SS; ranks save before it"),
    "partition": ("NAME", "where the job runs"),
    "account": ("NAME", "who pays"),
    "gres": ("LIST", "what each node must have, e.g. gpu:4"),
    "requeues": ("N", "how often a job that was stopped and has saved goes on (default: 20)"),
    "job-name": ("NAME", "the job's name (default: that of the experiment or script)"),
    "python": ("PATH", "interpreter on the machines (default: this one)"),
}
LISTS = {
    "sbatch-option": ("OPTION", "a further option, e.g. --sbatch-option=--constraint=a100"),
}
FLAGS = {
    "slurm": "run on a Slurm cluster, as one job",
    "dry-run": "print the batch script, and submit nothing",
}
NAMES = tuple(f"--{name}" for name in (*VALUES, *LISTS, *FLAGS))


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options, as a group of their own."""
    group = parser.add_argument_group("clusters", "See docs/clusters.md.")
    group.add_argument(
        "--kubernetes",
        action=argument_types.OptionInstead,
        nargs=0,
        const="Shoal renders no JobSet. Put your command into the manifest of "
        "docs/clusters.md#kubernetes, and give it to kubectl",
        help=argparse.SUPPRESS,
    )
    for name, help in FLAGS.items():
        group.add_argument(f"--{name}", action="store_true", help=help)
    for name, (metavar, help) in VALUES.items():
        group.add_argument(f"--{name}", metavar=metavar, help=help)
    for name, (metavar, help) in LISTS.items():
        group.add_argument(f"--{name}", action="append", default=[], metavar=metavar, help=help)


def is_asked(options: argparse.Namespace) -> bool:
    """Return True if the command is for a cluster.

    Raises:
        UsageError: options of a cluster are given, and no cluster.
    """
    if options.slurm:
        return True
    # Hosts that are reached by ssh have an interpreter too.
    has_hosts = options.hosts is not None or options.hostfile is not None
    values = [name for name in VALUES if name != "python" or not has_hosts]
    if given := _given(options, (*values, *LISTS, *FLAGS)):
        raise UsageError(f"{', '.join(given)}: only with --slurm")
    return False


def number(
    options: argparse.Namespace, name: str, default: int | None, low: int, problems: list[str]
) -> int | None:
    """Return the value of an option that is a whole number; the default after a problem.

    Args:
        options: of the command.
        name: of the option, without dashes.
        default: where the option is not given.
        low: the smallest value.
        problems: gets a line where the value is no such number.
    """
    text = getattr(options, name.replace("-", "_"))
    if text is None:
        return default
    parse: Callable[[str], int] = argument_types.integer(low, 1_000_000)
    try:
        return parse(text)
    except argparse.ArgumentTypeError as error:
        problems.append(f"--{name}: {error}")
        return default


def without(words: Sequence[str], more: Sequence[str] = ()) -> list[str]:
    """Return the words of a command without the options of this module.

    Args:
        words: of the command; none of a user's script.
        more: names of further options with a value, to be left out too.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    arguments(parser)
    for name in more:
        parser.add_argument(name)
    return parser.parse_known_args(list(words))[1]


def _given(options: argparse.Namespace, names: Sequence[str]) -> list[str]:
    values: dict[str, Any] = vars(options)
    return [
        f"--{name}" for name in names if values[name.replace("-", "_")] not in (None, [], False)
    ]
