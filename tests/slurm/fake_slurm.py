"""sbatch, sinfo, srun, scontrol and scancel for one job of this machine, as its script uses them.

    python fake_slurm.py COMMAND ARGUMENTS...

The state of the job is in the files of $FAKE_SLURM. Its tasks are processes of one group.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

FOLDER = Path(os.environ["FAKE_SLURM"])
JOB = "12"


def sbatch(words: list[str]) -> None:
    script = sys.stdin.read()
    (FOLDER / "script").write_text(script)
    (FOLDER / "environment").write_text("\n".join(os.environ))
    if "--account=nobody" in script:
        sys.exit("sbatch: error: Batch job submission failed:\nInvalid account specified")
    state("RUNNING")
    subprocess.Popen(
        [sys.executable, __file__, "slurmd"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    print(JOB)


def sinfo(words: list[str]) -> None:
    print("debug*:3\ndebug*:1\nlarge:64")


def slurmd(words: list[str]) -> None:
    """Run the script, and again after each requeue."""
    script = (FOLDER / "script").read_text()
    output = script.split("--output=")[1].split()[0].replace("%j", JOB)
    restarts = 0
    while True:
        environment = {**os.environ, "SLURM_JOB_ID": JOB, "SLURM_RESTART_COUNT": str(restarts)}
        with open(output, "ab") as log:
            ended = subprocess.run(
                ["bash", str(FOLDER / "script")], env=environment, stdout=log, stderr=log
            )
        if not (FOLDER / "requeue").exists():
            break
        (FOLDER / "requeue").unlink()
        restarts += 1
        state("RUNNING")
    final = "COMPLETED" if ended.returncode == 0 else "FAILED"
    if (FOLDER / "cancelled").exists():
        final = "CANCELLED"
    state(final, ended.returncode)


def srun(words: list[str]) -> None:
    (count,) = (int(word.partition("=")[2]) for word in words if word.startswith("--ntasks="))
    command = words[next(i for i, word in enumerate(words) if not word.startswith("--")) :]
    tasks = []
    for rank in range(count):
        environment = {
            **os.environ,
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": "0",
            "SLURM_NODEID": str(rank),
            "SLURM_STEP_NUM_TASKS": str(count),
            "SLURM_STEP_TASKS_PER_NODE": f"1(x{count})",
            "SLURM_STEP_NODELIST": f"n[1-{count}]",
        }
        is_shown = "--output=0" not in words or rank == 0
        tasks.append(
            subprocess.Popen(
                command,
                env=environment,
                stdout=None if is_shown else subprocess.DEVNULL,
            )
        )
    (FOLDER / "tasks").write_text(" ".join(str(task.pid) for task in tasks))
    codes = [task.wait() for task in tasks]
    sys.exit(max(code if code >= 0 else 128 - code for code in codes))


def scontrol(words: list[str]) -> None:
    if "hostnames" in words:
        print("n1")
    elif "node" in words:
        print("NodeName=n1 NodeAddr=127.0.0.1 NodeHostName=n1")
    elif "requeue" in words:
        (FOLDER / "requeue").touch()
        state("PENDING")
    else:
        print(f"JobId={JOB} JobName=x {(FOLDER / 'state').read_text()} NodeList=n1")


def scancel(words: list[str]) -> None:
    (FOLDER / "cancelled").touch()
    state("COMPLETING")
    for pid in (FOLDER / "tasks").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGTERM)


def state(name: str, code: int = 0) -> None:
    new = FOLDER / f"state.{os.getpid()}"
    new.write_text(f"JobState={name} Reason=None Restarts=0 ExitCode={code}:0")
    new.rename(FOLDER / "state")


if __name__ == "__main__":
    commands = {"sbatch": sbatch, "sinfo": sinfo, "slurmd": slurmd, "srun": srun}
    commands |= {"scontrol": scontrol, "scancel": scancel}
    commands[sys.argv[1]](sys.argv[2:])
