"""A job that is in Slurm's hands: sbatch, scontrol, scancel. `sacct` is not needed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass

from shoal.errors import LaunchError, UsageError

COMMANDS = ("sbatch", "scontrol", "scancel")
PATIENCE_S = 60.0
"""Limit of one of Slurm's commands. A controller that does not answer ends them earlier."""
KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT", "SLURM_JWT")
"""Variables that are the user's and not those of a job from which this command is called."""
DECIDED = (
    *("SBATCH_ARRAY_INX", "SBATCH_CLUSTERS", "SBATCH_JOB_NAME", "SBATCH_WAIT", "SBATCH_SIGNAL"),
    *("SBATCH_OUTPUT", "SBATCH_ERROR", "SBATCH_OPEN_MODE", "SBATCH_REQUEUE", "SBATCH_NO_REQUEUE"),
)
"""Variables that would overrule what the script always has."""
DEFAULTS = {
    "SBATCH_ACCOUNT": "--account=",
    "SBATCH_PARTITION": "--partition=",
    "SBATCH_TIMELIMIT": "--time=",
    "SBATCH_GRES": "--gres=",
}
"""Variables of the user's that count where the script does not have their option."""
ENDED = (
    "COMPLETED",
    "CANCELLED",
    "FAILED",
    "TIMEOUT",
    "NODE_FAIL",
    "PREEMPTED",
    "BOOT_FAIL",
    "DEADLINE",
    "OUT_OF_MEMORY",
    "REVOKED",
)


@dataclass(frozen=True)
class SlurmStatus:
    """A job as the controller sees it.

    Args:
        state: one of Slurm's words, such as PENDING.
        reason: why it is in this state; `None` if Slurm gives no reason.
        exit_code: the exit code of the batch script; 0 before its end.
        signal: the number of the signal that has ended the script; 0 for none.
    """

    state: str
    reason: str
    exit_code: int
    signal: int

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED

    @property
    def code(self) -> int:
        """Return the exit code of a shell for a job that has ended."""
        if self.state == "COMPLETED":
            return self.exit_code
        return self.exit_code or (128 + self.signal if self.signal else 1)


def missing_commands() -> list[str]:
    """Return a line if commands of Slurm are not there."""
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    if not missing:
        return []
    return [
        f"--slurm: there is no {', '.join(missing)} on the PATH. Use a login node of the cluster, "
        "or --dry-run to see the batch script"
    ]


def submit(script: str) -> str:
    """Give the script to sbatch and return the job's id.

    Raises:
        UsageError: sbatch refuses the job.
    """
    # In a session of its own, so that a Ctrl-C cannot end it between submission and answer.
    ended = subprocess.run(
        ["sbatch", "--parsable"],
        input=script,
        capture_output=True,
        text=True,
        env=_environment(script),
        start_new_session=True,
    )
    job = ended.stdout.strip().split(";")[0]
    if ended.returncode != 0 or not job.isdecimal():
        reason = " ".join((ended.stderr.strip() or ended.stdout.strip()).split())
        raise UsageError(f"sbatch refused the job: {reason or f'status {ended.returncode}'}")
    return job


def _environment(script: str) -> dict[str, str]:
    """Return the variables for the job, without those that would overrule its script.

    SLURM_ variables describe the job from which this command is called, if there is one.
    """
    overruling = {*DECIDED, *(name for name, option in DEFAULTS.items() if option in script)}
    return {
        name: value
        for name, value in os.environ.items()
        if name not in overruling and (not name.startswith("SLURM_") or name in KEPT)
    }


def status(job: str) -> SlurmStatus | None:
    """Return a job's status; None if the controller has forgotten the job.

    Raises:
        LaunchError: the controller cannot be asked.
    """
    ended = _run("scontrol", "--oneliner", "show", "job", job)
    if ended.returncode != 0:
        if "Invalid job id" in ended.stderr:
            return None
        raise LaunchError(f"scontrol show job {job}: {ended.stderr.strip()}")
    return _parse(ended.stdout)


def _parse(text: str) -> SlurmStatus:
    def value(name: str, default: str) -> str:
        found = re.search(rf"(?:^|\s){name}=(\S*)", text)
        return found.group(1) if found else default

    code, _, number = value("ExitCode", "0:0").partition(":")
    state = value("JobState", "UNKNOWN").split(",")[0]
    return SlurmStatus(state, value("Reason", "None"), int(code), int(number or 0))


def cancel(job: str, at_once: bool = False) -> None:
    """Cancel a job. Its ranks get SIGTERM and, after the cluster's KillWait, SIGKILL.

    Args:
        at_once: send SIGKILL without waiting.

    Raises:
        LaunchError: scancel fails; the job may run on.
    """
    kill = ["--full", "--signal=KILL"] if at_once else []
    ended = _run("scancel", *kill, job)
    if ended.returncode != 0 and "Invalid job id" not in ended.stderr:
        raise LaunchError(
            f"scancel {job} failed, and the job may run on: {ended.stderr.strip()}. "
            f"Cancel it when Slurm answers: scancel {job}"
        )


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_S, start_new_session=True
        )
    except subprocess.TimeoutExpired:
        text = f"no answer within {PATIENCE_S:.0f} s"
        return subprocess.CompletedProcess(command, 1, "", text)
