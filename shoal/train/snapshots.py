"""Snapshots of a run: its checkpoints in the memory of the hosts, which outlive a killed rank.

    every K steps    state ──> files in this host's memory ──> copies on `snapshot.copies` others
    a restart        the newest step that is whole, in memory or in the run directory

A snapshot is a checkpoint, with the protocol of one: the step before stays until the files of all
ranks are there and were compared. So a kill at any moment leaves a whole one. The launcher of the
run holds the memory, on several hosts the agent of each (`shoal.launch.snapshot_memory`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from shoal.config.job import Job
from shoal.errors import CheckpointError, UsageError
from shoal.launch.snapshot_memory import VARIABLE, share_lock
from shoal.run import Run
from shoal.train.checkpoint import AsyncSaver, Checkpoints, Saved, tensor_files
from shoal.train.checkpoint.host_disks import HostDisks, numbered
from shoal.train.checkpoint.separate_store import SeparateCheckpoints
from shoal.train.job_precheck import NO_LAUNCHER
from shoal.train.run_directory import last_saved
from shoal.train.run_saver import RunSaver, State
from shoal.train.snapshot_room import check_room

KEPT = 1
"""Whole snapshots between two saves; while one is written, there are two."""
ONE_MEMORY = HostDisks((0,))


@dataclass(frozen=True)
class Snapshots:
    """The snapshots of a run on this rank.

    Args:
        every: steps between two; 0 for none.
        saver: of the directory in memory; None for none.
        memories: the memory of each rank's host.
    """

    every: int = 0
    saver: RunSaver | None = None
    memories: HostDisks = ONE_MEMORY

    def is_due(self, step: int) -> bool:
        """Return True if a snapshot belongs to this step."""
        return self.saver is not None and step % self.every == 0

    def take(self, step: int, collect: Callable[[], State | None]) -> None:
        """Take the snapshot of `step`. Collective. A failure is noted, and training goes on.

        Args:
            collect: returns the state; None for a state that must not be resumed.
        """
        assert self.saver is not None
        self.saver.wait()
        state = collect()
        if state is not None:
            self.saver.save(step, state, is_best=False, must_succeed=False)

    def close(self) -> None:
        """End the thread that writes, if there is one."""
        if self.saver is not None:
            self.saver.close()

    def describe(self) -> list[str]:
        """Return the line about the snapshots for the header of a run; none without them."""
        if self.saver is None:
            return []
        line = f"snapshots every {self.every} steps, in the memory of "
        copies = min(self.memories.copies, self.memories.count - 1)
        others = f" and of {copies} other host{'' if copies == 1 else 's'}" if copies else ""
        whose = "this host" if self.memories.count == 1 else "each rank's host"
        return [line + whose + others]


def open_snapshots(
    job: Job,
    run: Run,
    pause: Callable[[str], AbstractContextManager[None]],
    note: Callable[[str], None],
) -> Snapshots:
    """Return the snapshots of a job, which may have none. Collective.

    Args: run: after `prepare`.

    Raises:
        UsageError: on every rank; no launcher of ours holds memory for them on a host.
        ConfigError: on every rank; a host has too little memory.
    """
    mesh = run.mesh
    every = job.snapshot.every
    if every is None:
        return Snapshots()
    own = os.environ.get(VARIABLE, "")
    places = mesh.all_gather_str(own)
    if not all(places):
        without = ", ".join(str(rank) for rank, place in enumerate(places) if not place)
        raise UsageError(f"snapshot.every {every}: {NO_LAUNCHER}. Ranks without: {without}")
    share_lock(Path(own))  # to the end of this process
    hosts = [places.index(place) for place in places]
    memories = HostDisks(numbered(hosts), job.snapshot.copies)
    check_room(run.parameters().values(), memories, mesh, Path(own))
    asynchronous = job.snapshot.asynchronous
    group = mesh.new_group() if asynchronous else None
    directory = Path(own, "checkpoints")
    store = (
        Checkpoints(directory, KEPT, group)
        if memories.count == 1
        else SeparateCheckpoints(directory, memories, KEPT, group)
    )
    # All ranks of one stage hold the same full tensors, and each writes some of them.
    thread = AsyncSaver(store, mesh.size // mesh.pipeline.size) if asynchronous else None
    return Snapshots(every, RunSaver(store, thread, pause, note), memories)


class Loaded(NamedTuple):
    """A checkpoint that was loaded.

    Attributes:
        saved: None where there is none.
        is_snapshot: it was in memory.
    """

    saved: Saved | None
    is_snapshot: bool

    def describe(self) -> str:
        """Return where it was, for a note."""
        assert self.saved is not None
        if self.is_snapshot:
            return f"the snapshot of step {self.saved.step}, in memory"
        return str(self.saved.path)


class _NamedStore(NamedTuple):
    store: Checkpoints
    is_snapshot: bool
    named_step: int  # of the newest checkpoint by its name; -1 without any


def load_newest(
    checkpoints: Checkpoints,
    snapshots: Snapshots,
    report: Callable[[str], None],
    like: tensor_files.LayoutLookup,
) -> Loaded:
    """Load the newest good checkpoint of the run directory or of the memory. Collective.

    Args: report, like: as of `Checkpoints.load`.

    Raises:
        CheckpointError: on every rank; nothing could be loaded, and the run directory has
            checkpoints.
    """
    sources = [_NamedStore(checkpoints, False, _named_step(checkpoints))]
    if snapshots.saver is not None:
        store = snapshots.saver.checkpoints
        sources.append(_NamedStore(store, True, _named_step(store)))
    found = Loaded(None, False)
    problem: CheckpointError | None = None
    for source in sorted(sources, key=lambda one: -one.named_step):
        if found.saved is not None and found.saved.step >= source.named_step:
            break
        try:
            saved = source.store.load(report, like=like)
        except CheckpointError as error:
            if source.is_snapshot:
                report(str(error))
            else:
                problem = error
            continue
        if saved is not None and (found.saved is None or saved.step > found.saved.step):
            found = Loaded(saved, source.is_snapshot)
    if problem is not None:
        if found.saved is None:
            raise problem
        report(str(problem))
    return found


def _named_step(store: Checkpoints) -> int:
    """Return the step of the newest checkpoint of any rank's directory, by its name."""
    own = last_saved(store.directory.parent)
    steps: list[int] = store.consensus.all_gather_objects(-1 if own is None else own)
    return max(steps)
