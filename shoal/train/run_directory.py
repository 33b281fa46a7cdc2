"""The run directory: it holds one experiment, and says so.

runs/digits/
  config.yaml       the merged configuration; it reproduces the run
  metrics.jsonl     one JSON object a line
  tensorboard/      the same, as events
  checkpoints/      step-00000120/ ..., latest, best
  curves.png        drawn when the run ends
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from errno import EACCES, ENOTDIR
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from shoal.config import differences, read, to_yaml
from shoal.config.job import Job
from shoal.errors import ConfigError
from shoal.platform.files import atomic_write

if TYPE_CHECKING:
    from shoal.comm.mesh import Mesh

CONFIG, LOCK = "config.yaml", ".lock"
WORK = ("checkpoints", "metrics.jsonl")
"""What a run that got as far as training has left; without these there is nothing to lose."""


def check_usable(job: Job) -> None:
    """Raise ConfigError where `claim` would, as far as can be told without making anything. One
    process calls it.
    """
    directory = Path(job.directory)
    _refuse_what_is_there(directory, job)
    nearest = next(path for path in (directory, *directory.parents) if path.exists())
    try:
        if (directory / LOCK).exists():
            _locked(directory).close()
        elif not nearest.is_dir():
            raise NotADirectoryError(ENOTDIR, f"{nearest} is no directory")
        elif not os.access(nearest, os.W_OK | os.X_OK):
            raise PermissionError(EACCES, f"permission denied in {nearest}")
    except OSError as error:
        raise _unwritable(directory, error) from error


def lock(job: Job) -> IO[str]:
    """Make `job`'s run directory, or take it up again. One process calls it, once the model and the
    data are there.

    Returns: a lock, held until it is closed or the process ends, however it ends.
    Raises: ConfigError: it holds another experiment, or files that are no run, or a run that is
        training right now, or one that shall not be resumed.
    """
    directory = Path(job.directory)
    _refuse_what_is_there(directory, job)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = _locked(directory)
        with atomic_write(directory / CONFIG, survives="file") as file:
            file.write(to_yaml(job).encode())
    except OSError as error:
        raise _unwritable(directory, error) from error
    return lock


def claim_for_all(job: Job, mesh: Mesh) -> AbstractContextManager[Any]:
    """`claim` by rank 0; where it is refused, every rank says so. Collective. Raises
    ConfigError.
    """
    claim: AbstractContextManager[Any] = nullcontext()
    problems: Sequence[str] = ()
    if mesh.rank == 0:
        try:
            claim = lock(job)
        except ConfigError as error:
            problems = error.problems
    refused = mesh.broadcast_str("\n".join(problems))
    if refused:
        raise ConfigError(refused.split("\n"))
    return claim


def job_of(directory: Path) -> Job:
    """The job that `directory` holds. Raises ConfigError when it is no run directory."""
    if not (directory / CONFIG).is_file():
        raise ConfigError([f"{directory} is no run directory: it has no {CONFIG}."])
    return read(directory / CONFIG).job


def last_saved(directory: Path) -> int | None:
    """The step of a run's newest checkpoint; None without any. Only its name is read: ranks
    verify what they load.
    """
    names = [path.name.removeprefix("step-") for path in (directory / "checkpoints").glob("step-*")]
    return max((int(name) for name in names if name.isdecimal()), default=None)


def _refuse_what_is_there(directory: Path, job: Job) -> None:
    if (directory / CONFIG).exists():
        if any((directory / name).exists() for name in WORK):
            _refuse_another_experiment(directory, job)
            _refuse_to_start_afresh(directory, job)
    elif strangers := _foreign_files(directory):
        names = ", ".join(strangers[:3])
        raise ConfigError(
            [
                f"{directory} holds files ({names}) but no {CONFIG}: it is no run. Choose another "
                "--out."
            ]
        )


def _unwritable(directory: Path, error: OSError) -> ConfigError:
    return ConfigError([f"{directory} cannot be written: {error.strerror}. Choose another --out."])


def _foreign_files(directory: Path) -> list[str]:
    """What a run did not put there; a kill may have left a config that was being written."""
    found = directory.iterdir() if directory.exists() else ()
    return sorted(
        path.name for path in found if path.name != LOCK and not path.name.startswith(f"{CONFIG}.")
    )


def _refuse_another_experiment(directory: Path, job: Job) -> None:
    changed = differences(job_of(directory), job)
    if changed:
        raise ConfigError(
            [
                f"{directory} holds another experiment: {'; '.join(changed)}. Choose another "
                "--out, or remove it."
            ]
        )


def _refuse_to_start_afresh(directory: Path, job: Job) -> None:
    """Two histories in one directory would take each other's records and checkpoints away."""
    if not job.checkpoint.resume and any((directory / "checkpoints").glob("step-*")):
        raise ConfigError(
            [
                f"checkpoint.resume: is false, but {directory} holds checkpoints. Choose another "
                "--out, or remove it."
            ]
        )


def _locked(directory: Path) -> IO[str]:
    """Two runs in one directory would remove each other's checkpoints."""
    lock = (directory / LOCK).open("a+")
    try:
        # Not flock: data-loader workers would inherit it, and hold it for seconds after a kill of
        # this process.
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        with lock:
            lock.seek(0)
            holder = lock.read().strip()
        raise ConfigError(
            [
                f"{directory} is being trained in by process {holder}. Wait for it, stop it, or "
                "choose another --out."
            ]
        ) from None
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    return lock
