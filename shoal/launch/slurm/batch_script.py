"""The batch script of a Slurm job: complete, so that `sbatch` can run it without Shoal's command.

Slurm sends SIGTERM to the ranks before the time limit, at a pre-emption and at `scancel`. They save
and end with 75, "run me again". The script puts the job back into the queue if it is still RUNNING:
after `scancel`, and where Slurm requeues it anyway, it is not.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator

from shoal.launch.cluster_work import ClusterWork
from shoal.launch.rank import EXIT_RESTART
from shoal.launch.slurm.slurm_options import SlurmOptions

LOG = "%x-%j.out"
"""The name of the log: the job's name and id."""
END = "shoal: the job's script ends with exit code"
"""The beginning of the last line of the log, where the script comes to its end."""
TASK = "shoal.launch.slurm.slurm_task"

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
    scontrol requeue "$SLURM_JOB_ID" && exit {restart}
  fi
  echo "shoal: saved, and not requeued; submit the job again to go on" >&2
fi
"""


def render(
    options: SlurmOptions, work: ClusterWork, python: str, directory: str, command: str
) -> str:
    """Return the batch script.

    Args:
        options: without problems.
        work: of each rank.
        python: the interpreter on the nodes.
        directory: where the ranks run.
        command: the command that the user has typed, for a remark at the top.
    """
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in _sbatch_options(options)),
        f"# Written by: {command}",
        f"cd -- {shlex.quote(directory)} || exit 1",
        "export PYTHONUNBUFFERED=1",
        *(f"export {name}={shlex.quote(value)}" for name, value in work.environment.items()),
    ]
    parts = [BODY.format(srun=_srun(options, work, python))]
    if work.restarts:
        parts.append(RESTARTS.format(restarts=work.restarts))
    parts.append(REQUEUE.format(restart=EXIT_RESTART, requeues=options.requeues))
    parts.append(f'echo "{END} $code" >&2\nexit $code\n')
    return "\n".join(lines) + "\n" + "".join(parts)


def _sbatch_options(options: SlurmOptions) -> Iterator[str]:
    yield f"--job-name={options.job_name}"
    yield f"--nodes={options.nodes}"
    yield f"--ntasks-per-node={options.ranks_per_node}"
    values = {
        "cpus-per-task": options.cpus_per_task,
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "gres": options.gres,
    }
    yield from (f"--{name}={value}" for name, value in values.items() if value is not None)
    yield f"--signal=TERM@{options.notice_s()}"
    yield "--requeue" if options.requeues else "--no-requeue"
    yield "--open-mode=append"
    yield f"--output={LOG}"
    yield from options.more


def _srun(options: SlurmOptions, work: ClusterWork, python: str) -> str:
    # The first rank that ends with 75 must not end those that still save, whatever the cluster's
    # KillOnBadExit says.
    words = ["srun", f"--ntasks={options.ranks}", "--kill-on-bad-exit=0"]
    if work.output == "first":
        words += ["--output=0", "--error=all"]
    elif work.output == "all":
        words.append("--label")
    task = ["-m", TASK] if work.needs_rank_variables else []
    return f"{shlex.join(words)} \\\n    {shlex.join([python, *task, *work.words])}"


def remark(words: list[str]) -> str:
    """Return a command as one line that can stand in a remark."""
    return "".join(letter if letter.isprintable() else "?" for letter in shlex.join(words))


def log_name(options: SlurmOptions, job: str) -> str:
    """Return the name of a job's log."""
    return os.path.join(".", LOG.replace("%x", options.job_name).replace("%j", job))[2:]
