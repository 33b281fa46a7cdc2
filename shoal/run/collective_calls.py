"""The collective calls of a run: which one this rank is in, and why one of them has failed.

rank 3    its samples are refused ──> writes why into the store ──> ends
rank 1    waits for rank 3 ──> finds that it has ended ──> reads why ──> raises the same

An error of one rank comes before its end, so the reason is there when another rank misses it.

rank 3    its script catches the error, and goes on to the next call ──> refused: the others are
          still in this one, and would take messages of the next step for those of this one

rank 0    forward_backward, call 8    waits for rank 1, or finds it in another call
rank 1    run.save, after call 7      its own loss was small enough, so it has left the loop

Each rank writes its place into the store, if a collective call fails or its program ends, and reads
those of the others. Where the places differ, that is the reason.
"""

from __future__ import annotations

import atexit
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

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
    printable,
)
from shoal.launch.failure import explanations, is_lost_peer
from shoal.platform.script_line import caller, script_line
from shoal.platform.torch_private.c10d import default_store

_SAME_ON_ALL = (DataError, StrategyRefused, TrainingDiverged, UsageError)
"""Errors that end all ranks as errors of the same class."""
WAIT_S = 20.0
"""Time in which all ranks must fail, where a script goes on after an error of its own."""
PLACES_S = 1.0
"""Time in which the other ranks write their places, after a call has failed."""
LONGEST_ENTRY = 4096
_STORE_HAS_ENDED = (RuntimeError, ValueError)
"""Errors of a store that has ended with its rank."""

CURE = (
    "A number of a rank's own, such as its loss on its own samples, must not decide that a rank "
    "breaks, continues or ends. Decide by a number that all ranks share: the loss that "
    "run.forward_backward returns, the sums of run.evaluate, or the mean of ranks: "
    "run.gather(torch.tensor([value])).mean()."
)

ALL_CALL = "All ranks call {call}, and none behind `if run.rank == 0`: one of them writes."


class LoopPlace(NamedTuple):
    """A place in a training loop.

    Attributes:
        call: such as "run.save"; empty for the end of the program.
        steps: calls of `forward_backward` and `backward` that the rank has begun.
        line: of the script; empty if it is not known.
    """

    call: str
    steps: int
    line: str

    @property
    def is_alone(self) -> bool:
        """True for a call that scripts put behind `if rank == 0`: no step and no pass."""
        return self.call not in ("", PASS, *STEPS)

    def describe(self, rank: int) -> str:
        """Return a sentence without a full stop."""
        at = f" ({self.line})" if self.line else ""
        if not self.call:
            return f"rank {rank} has ended after {self.steps} steps"
        if self.call in STEPS:
            return f"rank {rank} is in call {self.steps} of {self.call}{at}"
        return f"rank {rank} is in {self.call}{at}, after {self.steps} steps"


STEPS = ("run.forward_backward", "run.backward")
PASS = "a pass of a model"


def place_in(entry: bytes) -> LoopPlace | None:
    """Return the place in an entry of the store; None if a stranger has written something else."""
    try:
        call, steps, line = json.loads(text_of(entry))
        return LoopPlace(printable(str(call)), int(steps), printable(str(line)))
    except (ValueError, TypeError, RecursionError):
        return None


def text_of(entry: bytes) -> str:
    """Return the text of an entry of the store, which a stranger may have written."""
    return printable(entry[:LONGEST_ENTRY].decode(errors="replace"))


class CollectiveCalls:
    """Knows the collective call of this rank, and tells all ranks what has ended one of them in it.

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
        # By a call that another rank has missed.
        self._raised: BaseException | None = None
        self._call = ""
        self._steps = 0
        self._store: Any = None
        # A replay has the worker of each rank in one process, without a group.
        if mesh.size > 1 and dist.is_initialized():  # a program may make several runs
            self._store = default_store()
            run = self._store.add(f"shoal/runs of rank {mesh.rank}", 1)
            self._prefix = f"shoal/calls/{run}"
            atexit.register(self._end)
            explanations.append(self._explain_pass)

    @contextmanager
    def during(self, call: str) -> Iterator[None]:
        """Make a collective call in this context; one inside of another is none.

        Args: call: its name, such as "run.evaluate".

        Raises:
            UsageError: an earlier call has failed on this rank, and not on all others; or another
                rank makes another call, or has ended.
            The error of the rank that failed first, in the place of one that tells of its end.
        """
        if self._store is None or self._call:
            yield
            return
        self.check_all_failed()
        self._calls += 1
        self._call = call
        self._steps += call in STEPS
        try:
            yield
        except Exception as error:
            if not (isinstance(error, CollectiveFailed) or is_lost_peer(error)):
                self._has_raised = True
                self._tell(error)
                raise
            own = LoopPlace(self._call, self._steps, script_line(caller()))
            first = self._first(error) or self._explain(error, own)
            self._raised = first or error
            if first is None:
                raise
            raise first from error
        else:
            self._has_raised = False
        finally:
            self._call = ""

    def check_all_failed(self) -> None:
        """Raise UsageError if a call has failed on this rank, and other ranks are still in it."""
        if self._failed is None or self._steps_alone():
            return
        call, error = self._failed
        deadline = time.monotonic() + WAIT_S
        while (failed := self._store.add(f"{self._key(call)}/ranks", 0)) < self._ranks:
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

    def _key(self, name: int | str) -> str:
        return f"{self._prefix}/{name}"

    def _tell(self, error: Exception) -> None:
        kind = next((k.__name__ for k in _SAME_ON_ALL if isinstance(error, k)), "")
        plain = str(error) if isinstance(error, ShoalError) else headline_of(error)
        self._failed = self._calls, plain
        key = self._key(self._calls)
        with suppress(*_STORE_HAS_ENDED):
            self._store.add(f"{key}/ranks", 1)
            self._store.compare_set(key, "", json.dumps([self._rank, kind, plain]))

    def _first(self, own: BaseException) -> Exception | None:
        """Return the error to raise in the place of `own`; None if no rank has told one."""
        # Another rank may be a call ahead or behind. What this rank has raised itself is over.
        calls = [self._calls, self._calls + 1, *([] if self._has_raised else [self._calls - 1])]
        told = None
        with suppress(*_STORE_HAS_ENDED):
            key = next((key for key in map(self._key, calls) if self._store.check([key])), None)
            told = None if key is None else json.loads(self._store.get(key))
        if told is None or told[0] == self._rank:
            return None
        rank, kind, text = told
        for known in _SAME_ON_ALL:
            if known.__name__ == kind:
                return known(f"rank {rank} says: {text}")
        return PeerLost(f"rank {rank} has ended with {text} ({own})")

    def _explain_pass(self, error: BaseException, line: str) -> Exception | None:
        """Return the cause of an error outside of such calls: a model may gather its shards."""
        is_of_ranks = isinstance(error, CollectiveFailed) or is_lost_peer(error)
        if error is self._raised or not is_of_ranks:
            return None
        return self._first(error) or self._explain(error, LoopPlace(PASS, self._steps, line))

    def _explain(self, error: BaseException, own: LoopPlace) -> UsageError | None:
        """Return an error that says where the ranks are; None if they are at the same place.

        Args: error: of a collective call.
        """
        # A rank that has died is at no other place, and those that miss it are just behind it.
        named = [int(rank) for rank in re.findall(r"\brank (\d+)", str(error))]
        moves = not isinstance(error, PeerLost) and not self._steps_alone()
        deadline = time.monotonic() + PLACES_S
        with suppress(*_STORE_HAS_ENDED):
            self._write(own)
            while True:
                if self._store.check([self._key("reason")]):
                    return UsageError(text_of(self._store.get(self._key("reason"))))
                for rank, place in self._others():
                    is_elsewhere = moves and rank in named and place != own
                    if is_elsewhere or not place.call:
                        both = sorted([(self._rank, own), (rank, place)])
                        facts = ", and ".join(each.describe(number) for number, each in both)
                        cures = [
                            ALL_CALL.format(call=each.call) for _, each in both if each.is_alone
                        ]
                        cure = " ".join([*cures, CURE])
                        text = f"the ranks do not make the same calls: {facts}. {cure}"
                        self._store.compare_set(self._key("reason"), "", text)
                        return UsageError(text)
                if time.monotonic() > deadline:
                    return None
                time.sleep(0.02)
        return None

    def _others(self) -> Iterator[tuple[int, LoopPlace]]:
        for rank in range(self._ranks):
            key = self._key(f"place of {rank}")
            if rank != self._rank and self._store.check([key]):
                place = place_in(self._store.get(key))
                if place is not None:
                    yield rank, place

    def _write(self, place: LoopPlace) -> None:
        self._store.set(self._key(f"place of {self._rank}"), json.dumps(place))

    def _end(self) -> None:
        """Write that this program has ended, unless by an error, which says more."""
        if getattr(sys, "last_value", None) is None:
            with suppress(*_STORE_HAS_ENDED):
                self._write(LoopPlace("", self._steps, ""))
