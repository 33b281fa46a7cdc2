"""The first error in a collective call, told to the ranks that it leaves waiting.

rank 3    its samples are refused ──> writes why into the store ──> ends
rank 1    waits for rank 3 ──> finds that it has ended ──> reads why ──> raises the same

An error of one rank comes before its end, so the reason is there when another rank misses it.

rank 3    its script catches the error, and goes on to the next call ──> refused: the others are
          still in this one, and would take messages of the next step for those of this one
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch.distributed as dist

from shoal.comm.mesh import Mesh
from shoal.errors import (
    CollectiveFailed,
    DataError,
    PeerLost,
    ShoalError,
    StrategyRefused,
    TrainingDiverged,
    UsageError,
    headline_of,
)
from shoal.launch.failure import is_lost_peer
from shoal.platform.torch_private.c10d import default_store
from shoal.run.loop_position import LoopPosition

_SAME_ON_ALL = (DataError, StrategyRefused, TrainingDiverged, UsageError)
"""Errors that end all ranks as errors of the same class."""


WAIT_S = 20.0
"""Time in which all ranks must fail, where a script goes on after an error of its own."""


class FirstFailure:
    """Tells all ranks what has ended one of them in a collective call.

    Every rank must make as many, for calls are known by their number.

    Args: steps_alone: returns True where a rank may leave out a step, whatever the others do.
    """

    def __init__(self, mesh: Mesh, steps_alone: Callable[[], bool]) -> None:
        self._rank = mesh.rank
        self._ranks = mesh.size
        self._steps_alone = steps_alone
        # (number of the call, error) where a call has failed on this rank; None after others.
        self._failed: tuple[int, str] | None = None
        self._calls = 0
        self._has_raised = False
        self._run = 0
        self._position: LoopPosition | None = None
        # A replay has the worker of each rank in one process, without a group.
        if mesh.size > 1 and dist.is_initialized():  # a program may make several runs
            self._run = default_store().add(f"shoal/runs of rank {mesh.rank}", 1)
            store = default_store()
            self._position = LoopPosition(store, self._run, mesh.rank, mesh.size, steps_alone)

    @contextmanager
    def at(self, call: str) -> Iterator[None]:
        """Make a collective call in this context, whose own errors are no news for other ranks.

        Args: call: its name, such as "run.save".

        Raises: UsageError: another rank makes another call, or has ended.
        """
        if self._position is None:
            yield
            return
        with self._position.during(call):
            try:
                yield
            except Exception as error:
                if not _is_consequence(error):
                    raise
                explained = self._position.explain(error)
                if explained is None:
                    raise
                raise explained from error

    @contextmanager
    def shared(self, call: str) -> Iterator[None]:
        """Make a collective call in this context, and tell the other ranks of its error.

        Args: call: its name, such as "run.evaluate".

        Raises:
            UsageError: an earlier call has failed on this rank, and not on all others; or another
                rank makes another call, or has ended.
            The error of the rank that failed first, in the place of one that tells of its end.
        """
        self.check_all_failed()
        self._calls += 1
        with nullcontext() if self._position is None else self._position.during(call):
            try:
                yield
            except Exception as error:
                if self._position is None:
                    raise
                if not _is_consequence(error):
                    self._has_raised = True
                    self._tell(error)
                    raise
                first = self._first(error) or self._position.explain(error)
                if first is None:
                    raise
                raise first from error
        self._has_raised = False

    def check_all_failed(self) -> None:
        """Raise UsageError if a call has failed on this rank, and other ranks are still in it."""
        if self._failed is None or self._steps_alone():
            return
        call, error = self._failed
        deadline = time.monotonic() + WAIT_S
        while (failed := default_store().add(f"{self._key(call)}/ranks", 0)) < self._ranks:
            if time.monotonic() > deadline:
                raise UsageError(
                    f"rank {self._rank} has gone on after an error in a call of run that "
                    f"{failed} of {self._ranks} ranks have failed in: {error}. The others wait in "
                    "it, and would take what this rank sends now for a part of it. Let the error "
                    "end the program; leave samples out before the call, on all ranks, or give "
                    "them the weight 0 in shoal.counted(sum, count)."
                )
            time.sleep(0.02)
        self._failed = None

    def _key(self, call: int) -> str:
        return f"shoal/first failure/{self._run}/{call}"

    def _tell(self, error: Exception) -> None:
        kind = next((k.__name__ for k in _SAME_ON_ALL if isinstance(error, k)), "")
        plain = str(error) if isinstance(error, ShoalError) else _headline(error)
        self._failed = self._calls, plain
        try:
            default_store().add(f"{self._key(self._calls)}/ranks", 1)
            default_store().compare_set(
                self._key(self._calls), "", json.dumps([self._rank, kind, plain])
            )
        except (RuntimeError, ValueError):
            return  # the store may have ended with its rank

    def _first(self, own: Exception) -> Exception | None:
        """Return the error to raise in the place of `own`; None if no rank has told one."""
        # Another rank may be a call ahead or behind. What this rank has raised itself is over.
        calls = [self._calls, self._calls + 1, *([] if self._has_raised else [self._calls - 1])]
        try:
            store = default_store()
            key = next((key for key in map(self._key, calls) if store.check([key])), None)
            told = None if key is None else json.loads(store.get(key))
        except (RuntimeError, ValueError):
            return None
        if told is None or told[0] == self._rank:
            return None
        rank, kind, text = told
        for known in _SAME_ON_ALL:
            if known.__name__ == kind:
                return known(f"rank {rank} says: {text}")
        return PeerLost(f"rank {rank} has ended with {text} ({own})")


def _is_consequence(error: Exception) -> bool:
    return isinstance(error, CollectiveFailed) or is_lost_peer(error)


def _headline(error: Exception) -> str:
    return headline_of(error)
