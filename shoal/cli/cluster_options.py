"""The options of `launch` and `train` for Slurm and Kubernetes.

Values are read as text here and checked later, so that all problems can be said at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from shoal.cli import argument_types
from shoal.errors import UsageError

STARTERS = ("slurm", "kubernetes")
VALUES = {
    "nodes": ("N", "machines (default: 1)"),
    "ntasks-per-node": ("N", "ranks on each machine (default: 1)"),
    "cpus-per-task": ("N", "processors of each rank"),
    "time": ("LIMIT", "Slurm: minutes, HH:MM:SS or D-HH:MM:SS; ranks save before it"),
    "partition": ("NAME", "Slurm: where the job runs"),
    "account": ("NAME", "Slurm: who pays"),
    "gres": ("LIST", "Slurm: what each node must have, e.g. gpu:4"),
    "requeues": ("N", "how often a job that was stopped and has saved goes on (default: 20)"),
    "job-name": ("NAME", "the job's name (default: that of the experiment or script)"),
    "python": ("PATH", "interpreter on the machines (Kubernetes: python3; else this one)"),
    "image": ("IMAGE", "Kubernetes: the container's image, with Shoal and the script"),
    "namespace": ("NAME", "Kubernetes: where the job runs"),
    "workdir": ("DIR", "Kubernetes: the directory in which ranks run (default: the image's)"),
}
LISTS = {
    "sbatch-option": ("OPTION", "Slurm: a further option, e.g. --sbatch-option=--constraint=a100"),
    "limit": ("NAME=QUANTITY", "Kubernetes: of each pod, e.g. nvidia.com/gpu=4"),
    "claim": ("NAME:DIR", "Kubernetes: a persistent volume claim, for runs and data"),
}
FLAGS = {
    "slurm": "run on a Slurm cluster, as one job",
    "kubernetes": "run on a Kubernetes cluster, as one JobSet",
    "dry-run": "print the batch script or the JobSet, and submit nothing",
}
OF_SLURM = ("time", "partition", "account", "gres", "sbatch-option")
OF_KUBERNETES = ("image", "namespace", "workdir", "limit", "claim")
WITH_VALUE = tuple(f"--{name}" for name in (*VALUES, *LISTS))


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options, as a group of their own."""
    group = parser.add_argument_group("clusters", "See docs/clusters.md.")
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
    if options.slurm or options.kubernetes:
        return True
    # Hosts that are reached by ssh have an interpreter too.
    has_hosts = options.hosts is not None or options.hostfile is not None
    values = [name for name in VALUES if name != "python" or not has_hosts]
    if given := _given(options, (*values, *LISTS, *FLAGS)):
        raise UsageError(f"{', '.join(given)}: only with --slurm or --kubernetes")
    return False


def foreign_problems(options: argparse.Namespace) -> list[str]:
    """Return a line for options that do not go together."""
    found = []
    if options.slurm and options.kubernetes:
        found.append("--slurm and --kubernetes: give one of them")
    starter, others = ("--slurm", OF_KUBERNETES) if options.slurm else ("--kubernetes", OF_SLURM)
    if given := _given(options, others):
        found.append(f"{', '.join(given)}: not with {starter}")
    if options.processes is not None:
        found.append(
            f"-n {options.processes}: it counts processes of this machine. With {starter} give "
            "--nodes and --ntasks-per-node"
        )
    return found


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
