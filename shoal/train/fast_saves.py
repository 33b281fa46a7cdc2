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
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from shoal.checkpoint import Checkpoints, Saved, tensor_files
from shoal.comm.mesh import Mesh
from shoal.config.job import Job
from shoal.errors import CheckpointError, ConfigError
from shoal.platform.ownership import untrusted_reason
from shoal.train.run_directory import fast_directory, last_saved, name_fast_directory
from shoal.train.run_saver import RunSaver, State
from shoal.train.shared_check import check_shared

KEPT = 1
"""Whole checkpoints between two saves; while one is written, there are two."""


@dataclass(frozen=True)
class FastSaves:
    """The frequent saves of a run.

    Args:
        every: steps between two; 0 for none.
        saver: of the fast directory; None for none.
    """

    every: int = 0
    saver: RunSaver | None = None

    def is_due(self, step: int) -> bool:
        """Return True if a save belongs to this step."""
        return self.saver is not None and step % self.every == 0

    def take(self, step: int, collect: Callable[[], State | None]) -> None:
        """Save the state of `step`. Collective. A failure is noted, and training goes on.

        Args:
            collect: returns the state; None for a state that must not be resumed.
        """
        assert self.saver is not None
        state = collect()
        if state is not None:
            self.saver.save(step, state, is_best=False, must_succeed=False)

    def remove(self, rank: int) -> None:
        """Remove them on rank 0, after the last step of the run."""
        if rank == 0 and self.saver is not None:
            shutil.rmtree(self.saver.checkpoints.directory.parent, ignore_errors=True)

    def describe(self) -> list[str]:
        """Return the line about them for the header of a run; none without them."""
        if self.saver is None:
            return []
        return [f"saves every {self.every} steps in {self.saver.checkpoints.directory}"]


def open_fast_saves(
    job: Job,
    mesh: Mesh,
    pause: Callable[[str], AbstractContextManager[None]],
    note: Callable[[str], None],
) -> FastSaves:
    """Return the frequent saves of a job, which may have none. Collective, with the lock held.

    Raises:
        ConfigError: on every rank; the directory cannot be written, or hosts do not share it.
    """
    if job.checkpoint.fast_dir is None:
        return FastSaves()
    place, problem = "", ""
    if mesh.rank == 0:
        try:
            path = _make(job)
            place, problem = str(path), untrusted_reason(path) or ""
        except OSError as error:
            problem = f"{job.checkpoint.fast_dir} cannot be written: {error.strerror or error}"
    if problem := mesh.broadcast_str(problem):
        raise ConfigError([f"checkpoint.fast_dir: {problem}. Choose another one."])
    directory = Path(mesh.broadcast_str(place))
    check_shared(mesh, str(directory), "checkpoint.fast_dir")
    saver = RunSaver(Checkpoints(directory / "checkpoints", KEPT), None, pause, note)
    return FastSaves(job.checkpoint.fast_every_steps, saver)


def _make(job: Job) -> Path:
    """Make the fast directory of a run, and return it."""
    name_fast_directory(job)
    path = fast_directory(job.directory, job.checkpoint.fast_dir)
    assert path is not None
    if not job.checkpoint.resume:
        shutil.rmtree(path, ignore_errors=True)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


class _NamedStore(NamedTuple):
    store: Checkpoints
    is_fast: bool
    named_step: int  # of the newest checkpoint by its name; -1 without any


def load_newest(
    checkpoints: Checkpoints,
    fast: FastSaves,
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
    sources = [_NamedStore(checkpoints, False, _named_step(checkpoints))]
    if fast.saver is not None:
        store = fast.saver.checkpoints
        sources.append(_NamedStore(store, True, _named_step(store)))
    found, is_fast = None, False
    problem: CheckpointError | None = None
    for source in sorted(sources, key=lambda one: -one.named_step):
        if found is not None and found.step >= source.named_step:
            break
        try:
            saved = source.store.load(report, like=like)
        except CheckpointError as error:
            if source.is_fast:
                report(str(error))
            else:
                problem = error
            continue
        if saved is not None and (found is None or saved.step > found.step):
            found, is_fast = saved, source.is_fast
    if problem is not None:
        if found is None:
            raise problem
        report(str(problem))
    return found, is_fast


def _named_step(store: Checkpoints) -> int:
    """Return the step of the newest checkpoint of a directory by its name, as rank 0 sees it."""
    own = last_saved(store.directory.parent)
    steps: list[int] = store.consensus.all_gather_objects(-1 if own is None else own)
    return steps[0]
