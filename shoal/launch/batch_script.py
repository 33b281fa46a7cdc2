"""A Slurm job: its options, its batch script, which runs without Shoal's command, its submission.

Slurm sends SIGTERM to the ranks before the time limit, at a pre-emption and at `scancel`. They save
and end with 75, "run me again". The script puts the job back into the queue if it is still RUNNING:
after `scancel`, and where Slurm requeues it anyway, it is not.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shoal.errors import UsageError
from shoal.launch.output import Output
from shoal.launch.rank import EXIT_RESTART

KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_WAIT")
"""Variables that are the user's and not those of a job from which this command is called."""
OVERRULING = {"SBATCH_ARRAY_INX", "SBATCH_CLUSTERS", "SBATCH_ERROR", "SBATCH_NO_REQUEUE"}
"""Variables without an option of the script's that would change what the script relies on."""

FIRST_NODE = """\
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# Slurm may reach a node whose name no name server knows.
if ! getent hosts "$first" > /dev/null; then
  address=$(scontrol show node "$first" | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2)
  export MASTER_ADDR="${MASTER_ADDR:-$address}"
fi
"""
WORLD = """\
# The variables of env://, for a script that knows nothing of Slurm. Each task adds its own two.
export WORLD_SIZE={world} LOCAL_WORLD_SIZE={local_world}
export MASTER_ADDR="${{MASTER_ADDR:-$first}}"
export MASTER_PORT="${{MASTER_PORT:-$((15000 + SLURM_JOB_ID % 15000))}}"
"""
TASK = 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec "$@"'
BODY = """\
# scancel and a pre-emption signal this shell too. It waits for the ranks, which save.
trap : TERM
is_running() {{ scontrol show job "$SLURM_JOB_ID" | grep -q 'JobState=RUNNING '; }}
# srun has not read --cpus-per-task of the job since Slurm 22.05.
if [ -n "${{SLURM_CPUS_PER_TASK:-}}" ]; then
  export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
fi
ranks() {{
  {srun}
}}
ranks
code=$?
"""
RESTARTS = """\
# 130 and 143 are signals of somebody who wants an end. After others a rank was killed.
for ((restart = 1; restart <= {restarts}; restart++)); do
  if [ $code -le 128 ] || [ $code -eq 130 ] || [ $code -eq 143 ] || ! is_running; then break; fi
  echo "shoal: a rank was killed (exit code $code); restart $restart of {restarts}" >&2
  ranks
  code=$?
done
"""
REQUEUE = """\
# 75: the ranks were stopped and have saved.
if [ $code -eq {restart} ] && is_running; then
  if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {requeues} ]; then
    echo "shoal: saved; the job is back in the queue, and goes on in some minutes" >&2
    scontrol requeue "$SLURM_JOB_ID" && exit {restart}
  fi
  echo "shoal: saved, and not requeued; submit the job again to go on" >&2
fi
if [ $code -eq 143 ] && is_running; then
  echo "shoal: SIGTERM has ended the ranks, which saved nothing: they were still starting (longer" \
    "--time), or the script does not save when it is stopped" >&2
fi
"""
END = """\
echo "shoal: the job's script ends with exit code $code" >&2
exit $code
"""
TIME = re.compile(r"\d+(:\d{1,2}){0,2}|\d+-\d{1,2}(:\d{1,2}){0,2}")
SINFO_LIMIT_S = 20
NOTICE_S = 120
"""Seconds from the signal to the time limit, in which ranks finish their step and save."""
WAIT_S = 600
"""Seconds that ranks have to end in, and to save, after the first one has ended."""
FIXED = {
    *("nodes", "ntasks-per-node", "ntasks", "time", "partition", "output", "error", "open-mode"),
    *("requeue", "no-requeue", "signal", "array", "clusters", "wrap", "wait", "parsable"),
    *("test-only", "hold", "chdir"),
}
"""Options of sbatch that Shoal's command has itself, or on which the batch script relies."""


def render(
    options: argparse.Namespace, work: ClusterWork, python: str, directory: str, command: str
) -> str:
    """Return the batch script.

    Args:
        options: of the command, without problems.
        work: of each rank.
        python: the interpreter on the nodes.
        directory: where the ranks run.
        command: the command that the user has typed, for a remark at the top.
    """
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in _sbatch_options(options, work.name)),
        f"# Written by: {command}",
        f"cd -- {shlex.quote(directory)} || exit 1",
        "export PYTHONUNBUFFERED=1",
        # Else a rank that cannot start leaves all nodes to the others, which wait for it.
        f"export SLURM_WAIT=${{SLURM_WAIT:-{WAIT_S}}}",
        *(f"export {name}={shlex.quote(value)}" for name, value in work.environment.items()),
    ]
    parts = [FIRST_NODE]
    if work.output is not None:
        local_world = options.ntasks_per_node
        parts.append(WORLD.format(world=options.nodes * local_world, local_world=local_world))
    parts.append(BODY.format(srun=_srun(options, work, python)))
    if work.restarts:
        parts.append(RESTARTS.format(restarts=work.restarts))
    parts.append(REQUEUE.format(restart=EXIT_RESTART, requeues=options.requeues))
    parts.append(END)
    return "\n".join(lines) + "\n" + "".join(parts)


def _sbatch_options(options: argparse.Namespace, name: str) -> Iterator[str]:
    yield f"--job-name={name}"
    yield f"--nodes={options.nodes}"
    yield f"--ntasks-per-node={options.ntasks_per_node}"
    values = {"time": options.time, "partition": options.partition}
    given = {name: value for name, value in values.items() if value is not None}
    yield from (f"--{name}={shlex.quote(value)}" for name, value in given.items())
    yield f"--signal=TERM@{notice_s(options.time)}"
    yield "--requeue" if options.requeues else "--no-requeue"
    yield "--open-mode=append"
    yield f"--output={name}-%j.out"
    for option in options.sbatch_option:
        name, equals, value = option.partition("=")
        yield f"--{name}={shlex.quote(value)}" if equals else f"--{name}"


def _srun(options: argparse.Namespace, work: ClusterWork, python: str) -> str:
    # The first rank that ends with 75 must not end those that still save, whatever the cluster's
    # KillOnBadExit says.
    words = ["srun", f"--ntasks={options.nodes * options.ntasks_per_node}", "--kill-on-bad-exit=0"]
    if work.output == "first":
        words += ["--output=0", "--error=all"]
    elif work.output == "all":
        words.append("--label")
    if work.output is not None:
        words += ["bash", "-c", TASK, "task"]
    return f"{shlex.join(words)} \\\n    {shlex.join([python, *work.words])}"


def remark(words: list[str]) -> str:
    """Return a command as one line that can stand in a remark."""
    return "".join(letter if letter.isprintable() else "?" for letter in shlex.join(words))


def problems(options: argparse.Namespace) -> Iterator[str]:
    """Yield a line for each value that sbatch would not understand."""
    if options.time is not None and TIME.fullmatch(options.time) is None:
        yield (
            f"--time {options.time}: no time limit. Minutes, MM:SS, HH:MM:SS or D-HH:MM:SS, for "
            "example --time 04:00:00"
        )
    for option in options.sbatch_option:
        name = option.partition("=")[0]
        if not re.fullmatch(r"[a-z][a-z-]+", name) or not option.isprintable():
            yield (
                f"--sbatch-option '{option}': give the long name of an option of sbatch and its "
                "value, for example --sbatch-option=constraint=a100"
            )
        elif name in FIXED:
            yield (
                f"--sbatch-option '{option}': the batch script relies on its own {name}. "
                "--nodes, --ntasks-per-node, --time, --partition and --requeues change it"
            )


def notice_s(time: str | None) -> int:
    """Return the seconds before a time limit of sbatch's at which ranks get SIGTERM."""
    limit = _seconds(time) if time is not None else 0
    return NOTICE_S if limit == 0 else max(10, min(NOTICE_S, limit // 4))


def default_name(name: str) -> str:
    """Return a job's name for an experiment or a script: its unusual characters become `-`."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:64] or "shoal"


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


@dataclass(frozen=True)
class ClusterWork:
    """The work of one rank, which is the same for all of them.

    Args:
        name: of the job and its log, see `default_name`.
        words: the words after the interpreter. They begin with a script or with `-m`.
        environment: further variables for the ranks; no secrets, for anybody may read a job.
        output: the outputs that the user sees of a script, which may know only RANK, WORLD_SIZE and
            the other variables of `env://`; None for Shoal's own, which prints on rank 0 alone.
        restarts: how often all ranks start again after one was killed.
    """

    name: str
    words: tuple[str, ...]
    environment: Mapping[str, str]
    output: Output | None
    restarts: int


def missing(options: argparse.Namespace) -> list[str]:
    """Return a line if Slurm is not there, the partition is none, or has fewer nodes than the job.

    sbatch may let a job without nodes wait for ever.
    """
    if shutil.which("sbatch") is None:
        return [
            "--slurm: there is no sbatch on the PATH. Use a login node of the cluster, or "
            "--dry-run to see the batch script"
        ]
    named = options.partition or os.environ.get("SBATCH_PARTITION", "")
    command = ["sinfo", "--all", "--noheader", "--format=%P:%D"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=SINFO_LIMIT_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    nodes: Counter[str] = Counter()
    partitions = re.findall(r"^(\S+?)(\*?):(\d+)$", told, re.MULTILINE)
    for name, is_default, number in partitions:
        if name in named.split(",") or (is_default and not named):
            nodes[name] += int(number)
    if named and not nodes and partitions:
        names = ", ".join(dict.fromkeys(name for name, *_ in partitions))
        return [f"--partition {named}: Slurm has {names}"]
    if not nodes or max(nodes.values()) >= options.nodes:
        return []
    there = ", ".join(f"partition {name} has {number}" for name, number in nodes.items())
    return [f"--nodes {options.nodes}: {there}"]


def submit(script: str) -> str:
    """Give the script to sbatch and return the job's id.

    Raises:
        UsageError: sbatch refuses the job.
    """
    ended = subprocess.run(
        ["sbatch", "--parsable"],
        input=script,
        capture_output=True,
        text=True,
        env=_submission_environment(script),
    )
    job = ended.stdout.strip().split(";")[0]
    if ended.returncode != 0 or not job.isdecimal():
        reason = " ".join((ended.stderr.strip() or ended.stdout.strip()).split())
        raise UsageError(f"sbatch refused the job: {reason or f'status {ended.returncode}'}")
    return job


def _submission_environment(script: str) -> dict[str, str]:
    """Return the variables for the job, without those that would overrule its script.

    SLURM_ variables describe the job from which this command is called, if there is one.
    """
    options = re.findall(r"^#SBATCH --([a-z-]+)", script, re.MULTILINE)
    overruling = OVERRULING | {f"SBATCH_{name.upper().replace('-', '_')}" for name in options}
    if "time" in options:
        overruling.add("SBATCH_TIMELIMIT")
    return {
        name: value
        for name, value in os.environ.items()
        if name not in overruling and (not name.startswith("SLURM_") or name in KEPT)
    }
