"""The options of a Slurm job, and their checks before anything is submitted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

TIME = re.compile(r"\d+(:\d{1,2}){0,2}|\d+-\d{1,2}(:\d{1,2}){0,2}")
WORD = re.compile(r"[\w.,:=/@+-]+")
"""A value that needs no quotes in a batch script."""
NOTICE_S = 120
"""Seconds from the signal to the time limit, in which ranks finish their step and save."""
OWN = {
    "--nodes": "--nodes",
    "-N": "--nodes",
    "--ntasks-per-node": "--ntasks-per-node",
    "--ntasks": "--nodes and --ntasks-per-node",
    "-n": "--nodes and --ntasks-per-node",
    "--cpus-per-task": "--cpus-per-task",
    "-c": "--cpus-per-task",
    "--time": "--time",
    "-t": "--time",
    "--partition": "--partition",
    "-p": "--partition",
    "--account": "--account",
    "-A": "--account",
    "--gres": "--gres",
    "--job-name": "--job-name",
    "-J": "--job-name",
}
"""Options of sbatch that Shoal's command has itself."""
FIXED = {
    **dict.fromkeys(("--output", "-o", "--error", "-e", "--open-mode"), "the log is followed"),
    **dict.fromkeys(("--requeue", "--no-requeue"), "--requeues 0 turns it off"),
    "--signal": "it makes the ranks save before the time limit",
    **dict.fromkeys(("--array", "-a"), "one command is one job"),
    **dict.fromkeys(("--clusters", "-M", "--wrap", "--wait", "-W"), "the job is followed"),
    **dict.fromkeys(("--parsable", "--test-only", "--hold", "-H"), "the job is followed"),
    **dict.fromkeys(("--chdir", "-D"), "the job runs where it is submitted"),
}
"""Options of sbatch that the batch script decides, each with the reason."""


@dataclass(frozen=True)
class SlurmOptions:
    """A job's size and limits. A value of None is left to the cluster.

    Args:
        nodes: the number of nodes, >= 1.
        ranks_per_node: tasks on each node, >= 1; each task is one rank.
        cpus_per_task: processors of each rank.
        time: the time limit in one of sbatch's forms, such as 04:00:00.
        partition: the partition, or several with commas.
        account: the account that pays.
        gres: generic resources of each node, such as gpu:4.
        job_name: the job's name, of which the log's name is made.
        more: further options of sbatch, `--name=value` each.
        requeues: how often the job is put back into the queue after it has saved.
    """

    nodes: int
    ranks_per_node: int
    cpus_per_task: int | None
    time: str | None
    partition: str | None
    account: str | None
    gres: str | None
    job_name: str
    more: tuple[str, ...]
    requeues: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def problems(self) -> Iterator[str]:
        """Yield a line for each value that sbatch would not understand."""
        if self.time is not None and TIME.fullmatch(self.time) is None:
            yield (
                f"--time {self.time}: that is no time limit. Minutes, HH:MM:SS or D-HH:MM:SS, for "
                "example --time 04:00:00"
            )
        for name in ("partition", "account", "gres", "job_name"):
            value = getattr(self, name)
            if value is not None and WORD.fullmatch(value) is None:
                option = name.replace("_", "-")
                yield f"--{option} '{value}': use letters, digits and . , : = / @ + - alone"
        for option in self.more:
            yield from _option_problems(option)

    def notice_s(self) -> int:
        """Return the seconds before the time limit at which ranks get SIGTERM."""
        limit = _seconds(self.time) if self.time is not None else 0
        return NOTICE_S if limit == 0 else max(10, min(NOTICE_S, limit // 4))


def default_name(name: str) -> str:
    """Return a job's name for an experiment or a script: its unusual characters become `-`."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:64] or "shoal"


def _option_problems(option: str) -> Iterator[str]:
    name = re.split(r"[=\s]", option, maxsplit=1)[0]
    if not re.fullmatch(r"--[a-z][a-z-]+|-[A-Za-z]", name) or not option.isprintable():
        yield (
            f"--sbatch-option '{option}': that is no option of sbatch. One option each, for "
            "example --sbatch-option=--constraint=a100"
        )
    elif name in OWN:
        yield f"--sbatch-option '{option}': give {OWN[name]} to this command itself"
    elif name in FIXED:
        yield f"--sbatch-option '{option}': the batch script sets {name} itself ({FIXED[name]})"


def _seconds(time: str) -> int:
    """Return the seconds of a time limit in one of sbatch's forms; 0 means no limit."""
    days, dash, rest = time.rpartition("-")
    numbers = [int(number) for number in rest.split(":")]
    if dash:  # D-HH, D-HH:MM, D-HH:MM:SS
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(numbers) == 3:
        return (numbers[0] * 60 + numbers[1]) * 60 + numbers[2]
    minutes, seconds = (*numbers, 0)[:2]
    return minutes * 60 + seconds
