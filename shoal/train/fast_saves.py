"""Frequent saves in a fast directory, such as one in /dev/shm, beside those on the disk.

    every K steps   state ──> FAST_DIR/shoal-<digest>/checkpoints/step-00000012; the newest stays
    a start         the newer of the newest good checkpoint there and in the run directory

They have the protocol of a checkpoint, so a kill at any moment leaves a whole one. They go when the
run ends by itself, and stay after a kill, for the next start.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from shoal.checkpoint import Checkpoints, Saved, tensor_files
from shoal.comm.mesh import Mesh
from shoal.config.job import Job
from shoal.errors import CheckpointError, ConfigError
from shoal.platform.ownership import untrusted_reason
from shoal.train.run_directory import fast_directory, last_saved, name_fast_directory
from shoal.train.run_saver import RunSaver
from shoal.train.shared_check import check_shared


def open_fast_saver(
    job: Job,
    mesh: Mesh,
    pause: Callable[[str], AbstractContextManager[None]],
    note: Callable[[str], None],
) -> RunSaver | None:
    """Return the saver of a job's fast directory, if it has one. Collective, with the lock held.

    Raises:
        ConfigError: on every rank; the directory cannot be written, or hosts do not share it.
    """
    if job.checkpoint.fast_dir is None:
        return None
    path, problem = "", ""
    if mesh.rank == 0:
        try:
            path = _make(job)
            problem = untrusted_reason(Path(path)) or ""
        except OSError as error:
            problem = f"{job.checkpoint.fast_dir} cannot be written: {error.strerror or error}"
    if problem := mesh.broadcast_str(problem):
        raise ConfigError([f"checkpoint.fast_dir: {problem}. Choose another one."])
    path = mesh.broadcast_str(path)
    check_shared(mesh, path, "checkpoint.fast_dir")
    # One checkpoint stays; while another is written, there are two.
    return RunSaver(Checkpoints(Path(path, "checkpoints"), keep=1), None, pause, note)


def load_newest(
    checkpoints: Checkpoints,
    fast: RunSaver | None,
    report: Callable[[str], None],
    like: tensor_files.LayoutLookup,
) -> tuple[Saved | None, bool]:
    """Load the newest good checkpoint of the run directory or of the fast one. Collective.

    Args: report, like: as of `Checkpoints.load`.

    Returns: the checkpoint, None if there is none; and True if it was in the fast directory.
    Raises:
        CheckpointError: on every rank; nothing could be loaded, and the run directory has
            checkpoints.
    """
    stores = [checkpoints] if fast is None else [checkpoints, fast.checkpoints]
    steps = {store.directory: _last_step(store) for store in stores}
    newest, is_fast = None, False
    failures: dict[bool, CheckpointError] = {}  # True: of the run directory
    for store in sorted(stores, key=lambda store: -steps[store.directory]):
        if newest is not None and newest.step >= steps[store.directory]:
            break
        try:
            saved = store.load(report, like=like)
        except CheckpointError as error:
            failures[store is checkpoints] = error
            continue
        if saved is not None and (newest is None or saved.step > newest.step):
            newest, is_fast = saved, store is not checkpoints
    if newest is None and True in failures:
        raise failures[True]
    for failure in failures.values():
        report(str(failure))
    return newest, is_fast


def _make(job: Job) -> str:
    """Make the fast directory of a run, and return it."""
    name_fast_directory(job)
    path = fast_directory(job.directory, job.checkpoint.fast_dir)
    assert path is not None
    if not job.checkpoint.resume:
        shutil.rmtree(path, ignore_errors=True)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return str(path)


def _last_step(store: Checkpoints) -> int:
    """Return the step of the newest checkpoint of a directory by its name, as rank 0 sees it."""
    step = last_saved(store.directory.parent)
    steps: list[int] = store.consensus.all_gather_objects(-1 if step is None else step)
    return steps[0]
