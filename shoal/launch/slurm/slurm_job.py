"""A job in Slurm's hands: its submission, its log here, Ctrl-C there, its exit code in the end.

`sacct` is not needed.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import LaunchError, UsageError
from shoal.launch.slurm.batch_script import END
from shoal.launch.supervise import arrived, caught

COMMANDS = ("sbatch", "scontrol", "scancel")
PATIENCE_S = 60.0
"""Limit of one of Slurm's commands. A controller that does not answer ends them earlier."""
KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_WAIT")
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
LOG_S = 0.3
"""Seconds between two looks at the log."""
STATE_S = 5.0
"""Seconds between two questions to the controller, which serves the whole cluster."""
SOON_S = 1.0
"""The same at the job's beginning, and when its end is near."""
LATE_LINES_S = 5.0
"""Limit of the wait for the last line of a log on a network's file system."""
NEVER = ("PartitionConfig", "PartitionNodeLimit", "PartitionTimeLimit", "BadConstraints")
"""Reasons that time alone does not mend."""
FAILURES = 24
"""Questions in a row that the controller may leave unanswered: about two minutes."""


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


class FollowedJob:
    """A job that runs on other machines, and its log, which this process shows.

    Args:
        job: its id.
        log: there need not be a file yet.
        signals: as `supervise.caught` yields it; the first one cancels the job.
    """

    def __init__(self, job: str, log: Path, signals: socket.socket) -> None:
        self.job = job
        self.log = log
        self.signals = signals
        self._position = 0
        self._tail = b""
        self._stop_signal: int | None = None
        self._failures = 0
        self._noted = ""

    def run(self) -> int:
        """Show the log until the job has ended, and return its exit code; see `follow`."""
        start = time.monotonic()
        asked = -STATE_S
        is_last_look = False
        while True:
            select.select([self.signals], [], [], LOG_S)
            for number in arrived(self.signals):
                self._stop(number)
            self._forward()
            now = time.monotonic()
            is_soon = now - start < 10 or self._stop_signal or self._end_code is not None
            if now - asked < (SOON_S if is_soon else STATE_S):
                continue
            asked = now
            found = self._status()
            if found is None or found.has_ended:
                # A job that Slurm requeues may look ended for a moment.
                if is_last_look or self._stop_signal:
                    return self._end(found)
                is_last_look = True
            else:
                is_last_look = False
                self._note(found)

    def _forward(self) -> None:
        """Show what is new in the log."""
        try:
            with self.log.open("rb") as file:  # anew, or NFS would show what it remembers
                file.seek(self._position)
                text = file.read()
        except OSError:
            return
        self._position += len(text)
        self._tail = (self._tail + text)[-4096:]
        sys.stdout.flush()
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()

    @property
    def _end_code(self) -> int | None:
        """The exit code that the script has written as its last line; None before its end."""
        last_line = self._tail.decode(errors="replace").rstrip("\n").rpartition("\n")[2]
        code = last_line.removeprefix(END).strip()
        return int(code) if last_line.startswith(END) and code.isdecimal() else None

    def _stop(self, number: int) -> None:
        if number == signal.SIGTSTP:
            return
        _say(f"cancelling job {self.job}" + (" at once" if self._stop_signal else ""))
        cancel(self.job, at_once=self._stop_signal is not None)
        self._stop_signal = number

    def _status(self) -> SlurmStatus | None:
        """Return the job's status. An unanswered question counts as no news."""
        try:
            found = status(self.job)
        except LaunchError as error:
            self._failures += 1
            if self._failures > FAILURES:
                raise
            _say(f"{error}; asking again")
            return SlurmStatus("UNKNOWN", "None", 0, 0)
        self._failures = 0
        return found

    def _note(self, found: SlurmStatus) -> None:
        if found.state in ("UNKNOWN", "COMPLETING"):
            return
        note = f"job {self.job}: {found.state}"
        if found.state == "PENDING" and found.reason != "None":
            note += f" ({found.reason})"
        if found.reason in NEVER:
            note += ": Slurm does not start it as it is; Ctrl-C, and ask for less"
        if note != self._noted:
            self._noted = note
            _say(note)

    def _end(self, found: SlurmStatus | None) -> int:
        """Show the last lines, and return the exit code."""
        limit = time.monotonic() + LATE_LINES_S
        while self._end_code is None and time.monotonic() < limit:
            if found is not None and found.state in ("CANCELLED", "NODE_FAIL"):
                limit = min(limit, time.monotonic() + LOG_S)  # there may be no such line
            time.sleep(LOG_S)
            self._forward()
        if self._stop_signal is not None:
            _say(f"job {self.job} is cancelled")
            return 128 + self._stop_signal
        code = self._end_code if found is None else found.code
        if code is None:
            _say(f"Slurm has forgotten job {self.job}, and its log has no end: {self.log}")
            return 1
        if code:
            state = "ended" if found is None else found.state
            _say(f"job {self.job}: {state}, exit code {code}; its log: {self.log}")
        return code


def follow(submit: Callable[[], tuple[str, Path]]) -> int:
    """Submit a job, show its log until it has ended, and return its exit code.

    Main thread only. Ctrl-C and SIGTERM cancel the job, and are answered when it is gone; a second
    one does not leave its ranks the time to save. If this process is killed, or its terminal is
    closed, the job runs on.

    Args:
        submit: returns the job's id and its log.

    Returns:
        The exit code of the job's script; 130 after Ctrl-C, 143 after SIGTERM; 128 + n if signal n
        has ended it; 1 if Slurm has ended it, or knows it no more.

    Raises:
        LaunchError: Slurm does not answer, or the job cannot be cancelled.
    """
    with caught() as signals:
        job, path = submit()
        _say(f"job {job} is submitted; its log: {path}; Ctrl-C cancels it")
        return FollowedJob(job, path, signals).run()


def _say(text: str) -> None:
    print(f"shoal: {text}", file=sys.stderr, flush=True)
