"""Where ranks are in their training loops, told once they no longer make the same calls.

rank 0   forward_backward, call 8    waits for rank 1, or finds it in another call
rank 1   run.save, after call 7      its own loss was small enough, so it has left the loop

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
from contextlib import contextmanager
from typing import NamedTuple

from torch.distributed.distributed_c10d import Store

from shoal.errors import PeerLost, UsageError, printable
from shoal.platform.script_line import caller, script_line

LONGEST_ENTRY = 4096
WAIT_S = 1.0
"""Time in which the other ranks write their places, after a call has failed."""

CURE = (
    "A number of a rank's own, such as its loss on its own samples, must not decide that a rank "
    "breaks, continues or ends. Decide by a number that all ranks share: the loss that "
    "run.forward_backward returns, the sums of run.evaluate, or the mean of ranks: "
    "run.gather(torch.tensor([value])).mean()."
)


class LoopPlace(NamedTuple):
    """A place in a training loop.

    Attributes:
        call: such as "run.save"; empty for the end of the program.
        steps: calls of `forward_backward` that the rank has begun.
        line: of the script; empty if it is not known.
    """

    call: str
    steps: int
    line: str

    def describe(self, rank: int) -> str:
        """Return a sentence without a full stop."""
        at = f" ({self.line})" if self.line else ""
        if not self.call:
            return f"rank {rank} has ended after {self.steps} calls of run.forward_backward"
        if self.call == FORWARD_BACKWARD:
            return f"rank {rank} is in call {self.steps} of {self.call}{at}"
        return f"rank {rank} is in {self.call}{at}, after {self.steps} calls of {FORWARD_BACKWARD}"


FORWARD_BACKWARD = "run.forward_backward"


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


class LoopPosition:
    """Knows this rank's place in the loop, and finds why ranks do not make the same calls.

    Args:
        store: in which ranks meet.
        run: number of this run among those of the program.
        rank, ranks: this rank and the number of ranks.
        steps_alone: returns True where ranks may take different numbers of steps.
    """

    def __init__(
        self, store: Store, run: int, rank: int, ranks: int, steps_alone: Callable[[], bool]
    ) -> None:
        self._store = store
        self._prefix = f"shoal/place/{run}"
        self._rank = rank
        self._ranks = ranks
        self._steps_alone = steps_alone
        self._call = ""
        self._steps = 0
        atexit.register(self._end)

    @contextmanager
    def during(self, call: str) -> Iterator[None]:
        """Return a context in which this rank makes a call; one inside of another is none."""
        if self._call:
            yield
            return
        self._call = call
        self._steps += call == FORWARD_BACKWARD
        try:
            yield
        finally:
            self._call = ""

    def explain(self, error: Exception) -> UsageError | None:
        """Return an error that says where the ranks are; None if they are at the same place.

        Args: error: of a collective call.
        """
        own = LoopPlace(self._call, self._steps, script_line(caller()))
        # A rank that has died is at no other place, and those that miss it are just behind it.
        named = [int(rank) for rank in re.findall(r"\brank (\d+)", str(error))]
        moves = not isinstance(error, PeerLost) and not self._steps_alone()
        deadline = time.monotonic() + WAIT_S
        try:
            self._write(own)
            while True:
                if self._store.check([self._reason]):
                    return UsageError(text_of(self._store.get(self._reason)))
                for rank, place in self._others():
                    is_elsewhere = moves and rank in named and place != own
                    if is_elsewhere or not place.call:
                        return self._differs(own, rank, place)
                if time.monotonic() > deadline:
                    return None
                time.sleep(0.02)
        except (RuntimeError, ValueError):
            return None  # the store may have ended with its rank

    @property
    def _reason(self) -> str:
        return f"{self._prefix}/reason"

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"

    def _others(self) -> Iterator[tuple[int, LoopPlace]]:
        for rank in range(self._ranks):
            if rank != self._rank and self._store.check([self._key(rank)]):
                place = place_in(self._store.get(self._key(rank)))
                if place is not None:
                    yield rank, place

    def _differs(self, own: LoopPlace, rank: int, place: LoopPlace) -> UsageError:
        both = sorted([(self._rank, own), (rank, place)])
        facts = ", and ".join(each.describe(number) for number, each in both)
        text = f"the ranks do not make the same calls: {facts}. {CURE}"
        self._store.compare_set(self._reason, "", text)
        return UsageError(text)

    def _write(self, place: LoopPlace) -> None:
        self._store.set(self._key(self._rank), json.dumps(place))

    def _end(self) -> None:
        """Write that this program has ended, unless by an error, which says more."""
        if getattr(sys, "last_value", None) is not None:
            return
        try:
            self._write(LoopPlace("", self._steps, ""))
        except (RuntimeError, ValueError):
            return
