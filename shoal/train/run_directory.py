"""The run directory: it belongs to one experiment and one process at a time; all hosts share it.

runs/digits/
  config.yaml       all settings; `shoal train config.yaml` is the same experiment
  metrics.jsonl     one JSON object a line
  tensorboard/      the same records, as events
  checkpoints/      step-00000120/ ..., latest, best
  curves.png        drawn when the run ends
  .lock             locked while a run trains here
  .stopped          the step at which Ctrl-C stopped the ranks, until the command has told it
  .fast             a random word in the name of this run's directory in `checkpoint.fast_dir`

That all hosts share it is checked before training: rank 0 makes a small file, and the others look
for it. Device numbers and mount tables prove nothing: two machines may have the same ones, and one
file system may be mounted from two servers.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from errno import EACCES, ENOTDIR
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from shoal.config import differences, read, to_yaml
from shoal.config.job import Job
from shoal.errors import ConfigError
from shoal.platform.files import atomic_write, existing_directory
from shoal.platform.ownership import (
    open_own,
    read_text_of_file,
    untrusted_reason,
)

if TYPE_CHECKING:  # run directories are looked at without torch
    from shoal.comm.mesh import Mesh
    from shoal.train.console import Log


CONFIG = "config.yaml"
LOCK = ".lock"
FAST = ".fast"
STOPPED = ".stopped"
MAX_WORD_BYTES = 100
RESULTS = ("checkpoints", "metrics.jsonl")
"""Results of training: a directory without these may get another experiment."""
LOOK_S = 2.0
"""Seconds for which a host looks for the file of another; network file systems may be late."""
PAUSE_S = 0.1
PROBE_PREFIX = ".shoal-probe-"
"""Beginning of the name of a file that is there for a moment."""


def check_usable(job: Job) -> None:
    """Raise ConfigError if `lock` would, as far as that is known without making any file.

    For one process.
    """
    directory = Path(job.directory)
    _check_contents(directory, job)
    nearest = next(path for path in (directory, *directory.parents) if path.exists())
    try:
        if (directory / LOCK).exists():
            _open_lock(directory).close()
        elif not nearest.is_dir():
            raise NotADirectoryError(ENOTDIR, f"{nearest} is no directory")
        elif not os.access(nearest, os.W_OK | os.X_OK):
            raise PermissionError(EACCES, f"permission denied in {nearest}")
    except OSError as error:
        raise _unwritable(directory, error) from error


def lock(job: Job) -> IO[str]:
    """Make `job`'s run directory, or lock the existing one. For one process.

    Call it after model and data were built, so that a mistake there leaves no directory.

    Returns: the lock. It is released when it is closed or when the process ends, in any way.
    Raises:
        ConfigError: the directory holds another experiment, or files that are no run; or a run
            that is training now, or that `checkpoint.resume` forbids to go on with.
    """
    directory = Path(job.directory)
    _check_contents(directory, job)
    try:
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        lock = _open_lock(directory)
        with atomic_write(directory / CONFIG, survives="file", mode=0o644) as file:
            file.write(to_yaml(job).encode())
    except OSError as error:
        raise _unwritable(directory, error) from error
    return lock


def make_again(job: Job, log: Log) -> IO[str] | None:
    """Make the run directory again if it was removed while the run trains, and tell.

    For one process. Returns: the new lock; None if the directory is there, or cannot be made.
    """
    if (Path(job.directory) / CONFIG).exists():
        return None
    try:
        claim = lock(job)
    except ConfigError as error:
        log.note(str(error))
        return None
    log.reopen()
    log.note(
        f"{job.directory} was removed or moved while the run trains. It is made again; earlier "
        "checkpoints and records are gone from there"
    )
    return claim


def claim_for_all(job: Job, mesh: Mesh) -> AbstractContextManager[Any]:
    """Call `lock` on rank 0, and return the lock there. Collective.

    Raises:
        ConfigError: on every rank, if `lock` raised.
    """
    claim: AbstractContextManager[Any] = nullcontext()
    problems: Sequence[str] = ()
    if mesh.rank == 0:
        try:
            claim = lock(job)
        except ConfigError as error:
            problems = error.problems
    if text := mesh.broadcast_str("\n".join(problems)):
        raise ConfigError(*text.split("\n"))
    return claim


def job_of(directory: Path) -> Job:
    """Return the job of a run directory.

    Raises:
        ConfigError: it is none, or another user could have written its configuration, which names
            files to import.
    """
    if not (directory / CONFIG).is_file():
        raise ConfigError(
            f"{directory} is no run directory: it has no {CONFIG}, which `shoal train` writes. "
            "A script of your own evaluates by run.evaluate, and exports by run.save."
        )
    _check_owner(directory)
    return read(directory / CONFIG).job


def name_fast_directory(job: Job) -> None:
    """Name the directory of the frequent saves of a run that has no results yet. For one process.

    The lock must be held.
    """
    directory = Path(job.directory)
    if not (directory / FAST).exists() or not any((directory / name).exists() for name in RESULTS):
        with atomic_write(directory / FAST, survives="file", mode=0o644) as file:
            file.write(secrets.token_hex(16).encode())


def fast_directory(directory: str, fast_dir: str | None) -> Path | None:
    """Return the directory of a run's frequent saves; None if it has none.

    A run directory that was made anew, copied or moved has another one, so that no run goes on from
    the saves of another.
    """
    path = Path(directory).absolute()
    if fast_dir is None or not (path / FAST).is_file():
        return None
    word = read_text_of_file(path / FAST, MAX_WORD_BYTES)
    digest = hashlib.sha256(f"{path}\n{word}".encode()).hexdigest()
    return Path(fast_dir).absolute() / f"shoal-{digest[:16]}"


def last_saved(directory: str, fast_dir: str | None = None) -> int | None:
    """Return the step of a run's newest checkpoint; None if there is none.

    Only its name is read: ranks verify the checkpoint before they load it.
    """
    places = (Path(directory), fast_directory(directory, fast_dir))
    found = [path for place in places if place for path in place.glob("checkpoints/step-*")]
    names = [path.name.removeprefix("step-") for path in found]
    return max((int(name) for name in names if name.isdecimal()), default=None)


def leave_stop(directory: Path, step: int) -> None:
    """Leave the step at which a run was interrupted, for the command that has started its ranks."""
    with suppress(OSError):
        (directory / STOPPED).write_text(str(step))


def take_stop(directory: str) -> int | None:
    """Return and forget the step at which a run was interrupted; None if none was left."""
    path = Path(directory, STOPPED)
    try:
        step = int(path.read_text())
        path.unlink()
    except (OSError, ValueError):
        return None
    return step


def _check_contents(directory: Path, job: Job) -> None:
    if os.path.lexists(directory) and not directory.is_dir():
        raise ConfigError(f"{directory} is no directory. Choose another --out.")
    if directory.is_dir():
        _check_owner(directory)
    if (directory / CONFIG).exists():
        if not any((directory / name).exists() for name in RESULTS):
            return
        if changed := differences(job_of(directory), job):
            raise ConfigError(
                f"{directory} holds another experiment: {'; '.join(changed)}. Choose another "
                "--out, or remove it."
            )
        if not job.checkpoint.resume and any((directory / "checkpoints").glob("step-*")):
            # A new run would prune them.
            raise ConfigError(
                f"checkpoint.resume: is false, but {directory} holds checkpoints. Choose another "
                "--out, or remove it."
            )
    elif foreign := _foreign_files(directory):
        names = ", ".join(foreign[:3])
        raise ConfigError(
            f"{directory} holds files ({names}) but no {CONFIG}: it is no run. Choose another "
            "--out."
        )


def _check_owner(directory: Path) -> None:
    """Raise ConfigError if another user could have written the directory or its configuration."""
    paths = [directory.resolve(), directory / CONFIG]
    for path in paths if os.path.lexists(directory / CONFIG) else paths[:1]:
        if reason := untrusted_reason(path, allow_private_group=True):
            raise ConfigError(reason)


def _unwritable(directory: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{directory} cannot be written: {error.strerror}. Choose another --out.")


def _foreign_files(directory: Path) -> list[str]:
    """Return names of files that no run makes.

    A kill may have left a temporary file of the config, and another host may look just now if it
    sees this directory.
    """
    entries = directory.iterdir() if directory.exists() else ()
    return sorted(
        path.name
        for path in entries
        if path.name != LOCK and not path.name.startswith((f"{CONFIG}.", PROBE_PREFIX))
    )


def _open_lock(directory: Path) -> IO[str]:
    """Lock the directory. Raise ConfigError if another process has locked it.

    Two runs in one directory would prune each other's checkpoints.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
    lock = open(open_own(directory / LOCK, flags), "a+")  # noqa: SIM115 - the caller closes it
    try:
        # Not flock: data-loader workers would inherit that lock, and they live on for seconds after
        # this process is killed.
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        with lock:
            lock.seek(0)
            holder = lock.read().strip()
        raise ConfigError(
            f"{directory} is being trained in by process {holder}. Wait for it, stop it, or "
            "choose another --out."
        ) from None
    lock.truncate(0)
    job = os.environ.get("SLURM_JOB_ID")
    cluster_job = f", Slurm job {job}" if job else ""
    lock.write(f"{os.getpid()} on {socket.gethostname()}{cluster_job}\n")
    lock.flush()
    return lock


@contextmanager
def probe_in(directory: str) -> Iterator[str]:
    """Make a file where `directory` is, or would be made, and yield its path. Rank 0 calls it.

    Its name is random, and no other file has it. Yields "" where nothing can be written there.
    """
    path = existing_directory(directory) / f"{PROBE_PREFIX}{secrets.token_hex(16)}"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError:
        yield ""
        return
    try:
        os.close(descriptor)
        yield str(path)
    finally:
        with suppress(OSError):
            path.unlink()


def sees_probe(probe: str, timeout_s: float = LOOK_S) -> bool:
    """Return True if the file that another host has made is here as well. Other ranks call it."""
    end_s = time.monotonic() + timeout_s
    while not Path(probe).is_file():
        if time.monotonic() >= end_s:
            return False
        time.sleep(PAUSE_S)
    return True


def check_shared(mesh: Mesh, directory: str, setting: str) -> None:
    """Check that all ranks see the directory that rank 0 sees, by a small file. Collective.

    In a world of one host nothing is written or sent.

    Args:
        directory: it has the same name on every host, and need not exist.
        setting: the setting or flag that chooses it, for the error.

    Raises:
        ConfigError: on every rank; rank 0 cannot write there, or ranks do not see what it writes.
    """
    if mesh.place.local_world == mesh.place.world:
        return
    with probe_in(directory) if mesh.rank == 0 else nullcontext("") as probe:
        path = mesh.broadcast_str(probe)
        sees = bool(path) and (mesh.rank == 0 or sees_probe(path))
        seen = mesh.all_gather_str(str(sees))
    if not path:
        raise ConfigError(f"{setting} {directory}: rank 0 cannot write there. Choose another.")
    if blind := [str(rank) for rank, text in enumerate(seen) if text != "True"]:
        raise ConfigError(
            f"{setting} {directory}: rank {', '.join(blind)} does not see the directory of "
            "rank 0. All hosts must share it: choose one on a file system that all mount."
        )
