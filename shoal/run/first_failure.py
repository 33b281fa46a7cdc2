"""The first error in a collective call, told to the ranks that it leaves waiting.

rank 3    its samples are refused ──> writes why into the store ──> ends
rank 1    waits for rank 3 ──> finds that it has ended ──> reads why ──> raises the same

An error of one rank comes before its end, so the reason is there when another rank misses it.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

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
)
from shoal.launch.failure import is_lost_peer
from shoal.platform.torch_private.c10d import default_store

_SAME_ON_ALL = (DataError, StrategyRefused, TrainingDiverged, UsageError)
"""Errors that end all ranks as errors of the same class."""


class FirstFailure:
    """Tells all ranks what has ended one of them in a collective call.

    Every rank must make as many, for calls are known by their number.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._rank = mesh.rank
        self._calls = 0
        self._has_raised = False
        self._run = 0
        # A replay has the worker of each rank in one process, without a group.
        self._alone = mesh.size == 1 or not dist.is_initialized()
        if not self._alone:  # a program may make several runs
            self._run = default_store().add(f"shoal/runs of rank {mesh.rank}", 1)

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Make a collective call in this context.

        Raises: the error of the rank that failed first, in the place of one that tells of its end.
        """
        self._calls += 1
        try:
            yield
        except Exception as error:
            if self._alone:
                raise
            if not _is_consequence(error):
                self._has_raised = True
                self._tell(error)
                raise
            first = self._first(error)
            if first is None:
                raise
            raise first from error
        self._has_raised = False

    def _key(self, call: int) -> str:
        return f"shoal/first failure/{self._run}/{call}"

    def _tell(self, error: Exception) -> None:
        kind = next((k.__name__ for k in _SAME_ON_ALL if isinstance(error, k)), "")
        plain = str(error) if isinstance(error, ShoalError) else _headline(error)
        try:
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
    return traceback.format_exception_only(error)[-1].strip().splitlines()[0]
