"""The progress word, in which a rank says how far it is, and the page that it lies in.

    page of a rank    0      word
                      64     times of its last steps, STEPS of them in a ring
                      1088   (group, calls that the rank has begun), MAX_GROUPS of them
                      2112   length and text of a description, as JSON

Ranks write and the launcher reads without a lock. A word that is read while it is written is wrong
for a moment only, and the detectors act on words that have not changed for long.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

PAGE_BYTES = 8192
SINCE_AT, STEP_AT, CALL_AT, RING_AT = 0, 16, 24, 64
STEPS = 32
GROUPS_AT, MAX_GROUPS = 1088, 64
TEXT_AT = 2112
MAX_TEXT_BYTES = PAGE_BYTES - TEXT_AT - 4

WORD = struct.Struct("<qHHxxxxQQIHhQ")
EVENT = struct.Struct("<qHH")  # since, phase, flags
CALL = struct.Struct("<QIHhQ")  # call, group, kind, peer, length
STEP = struct.Struct("<Qqqq")  # step, its time, waiting, data
COUNT = struct.Struct("<IxxxxQ")  # group, calls
SINCE = struct.Struct("<q")
NUMBER = struct.Struct("<Q")
LENGTH = struct.Struct("<I")

WAITS, THREAD_WAITS, FIRST = 1, 2, 4
"""Flags: the main thread waits for other ranks; another thread does; the phase may take long,
because the step is the first one, or the first one with batches of this shape.
"""
COLLECTIVES = (
    "barrier",
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "gloo",
)
"""The kinds of calls. `phase_board` encodes their indices: the order must not change."""
KINDS = (*COLLECTIVES, "send", "recv", "servers")
"""Collectives, then messages, and the values of parameter servers."""
SEND, RECV, SERVERS = range(len(COLLECTIVES), len(KINDS))
NO_KIND = 99


class Phase(IntEnum):
    """The part of a run that a rank is in."""

    START = 0
    DATA = 1
    FORWARD = 2
    BACKWARD = 3
    REDUCE = 4
    OPTIMIZER = 5
    BETWEEN = 6
    EVALUATION = 7
    SAVE = 8
    END = 9


PHASE_NAMES: Mapping[Phase, str] = {
    Phase.START: "the start of the run",
    Phase.DATA: "the wait for data",
    Phase.FORWARD: "the forward pass",
    Phase.BACKWARD: "the backward pass",
    Phase.REDUCE: "the reduction of gradients",
    Phase.OPTIMIZER: "the optimizer's step",
    Phase.BETWEEN: "the script's code between two steps",
    Phase.EVALUATION: "an evaluation",
    Phase.SAVE: "a save",
    Phase.END: "the end of the run",
}


class ProgressWord(NamedTuple):
    """A rank's word.

    Attributes:
        since_ns: when the rank wrote last, on CLOCK_BOOTTIME.
        phase: one of `Phase`.
        flags: of WAITS, THREAD_WAITS and FIRST.
        step: optimizer steps of this process.
        call: number of the last collective that the rank has begun, in its group.
        group: `group_id` of that group; 0 for none yet.
        kind: index into KINDS of the last collective or message.
        peer: the other rank of a message; -1 without a message.
        length: numbers on each rank, of the last collective or message; 0 where it is not known.
    """

    since_ns: int
    phase: int
    flags: int
    step: int
    call: int
    group: int
    kind: int
    peer: int
    length: int

    @property
    def waits(self) -> bool:
        """True if the main thread waits for other ranks."""
        return bool(self.flags & WAITS)


class StepTimes(NamedTuple):
    """The times of one step of a rank, in nanoseconds."""

    step: int
    total_ns: int
    waited_ns: int
    data_ns: int

    @property
    def busy_ns(self) -> int:
        """The time in which the rank waited for nobody."""
        return self.total_ns - self.waited_ns


@dataclass(frozen=True)
class RankProgress:
    """All that the page of a rank says.

    Attributes:
        word: the word.
        calls: calls that the rank has begun, by `group_id`.
        groups: the global ranks of each group that the rank is in, by `group_id`.
        steps: the last steps, in their order.
        stage: of the pipeline.
        silent_s: since the word has changed, as `SilenceCounter` counts it.
    """

    word: ProgressWord
    calls: Mapping[int, int] = field(default_factory=dict)
    groups: Mapping[int, Sequence[int]] = field(default_factory=dict)
    steps: Sequence[StepTimes] = ()
    stage: int = 0
    silent_s: float = 0.0


def group_id(label: str, ranks: Sequence[int]) -> int:
    """Return the number of a group, the same on all its ranks; never 0."""
    return zlib.crc32(f"{label} {list(ranks)}".encode()) or 1


def decode_page(page: bytes) -> RankProgress | None:
    """Return what a page says; None before the rank has written."""
    word = ProgressWord(*WORD.unpack_from(page))
    if word.since_ns == 0:
        return None
    ring = [StepTimes(*STEP.unpack_from(page, RING_AT + STEP.size * i)) for i in range(STEPS)]
    counts = [COUNT.unpack_from(page, GROUPS_AT + COUNT.size * i) for i in range(MAX_GROUPS)]
    length = LENGTH.unpack_from(page, TEXT_AT)[0]
    text = page[TEXT_AT + LENGTH.size :][: min(length, MAX_TEXT_BYTES)]
    try:
        description = json.loads(text) if text else {}
    except ValueError:  # the rank writes it just now
        description = {}
    return RankProgress(
        word,
        {group: calls for group, calls in counts if group},
        {int(group): ranks for group, ranks in description.get("groups", {}).items()},
        sorted(times for times in ring if times.step),
        int(description.get("stage", 0)),
    )


class ProgressMemory:
    """The pages of the ranks of one start, in memory of the process that starts them.

    It has no name in any directory: ranks open it by way of /proc, as
    `shoal.launch.private_memory`. A second memory of the same kind takes the stacks that ranks
    write when they are asked for them.

    Args:
        ranks: the number of ranks.

    Attributes:
        path, stacks_path: where ranks open the two memories.
    """

    def __init__(self, ranks: int) -> None:
        self._words = os.memfd_create("shoal-progress")
        self._stacks = os.memfd_create("shoal-stacks")
        os.truncate(self._words, PAGE_BYTES * ranks)
        self.path, self.stacks_path = (
            f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in (self._words, self._stacks)
        )

    def page(self, rank: int) -> bytes:
        """Return the page of a rank, counted on this machine."""
        return os.pread(self._words, PAGE_BYTES, PAGE_BYTES * rank)

    def read(self, rank: int) -> RankProgress | None:
        """Return the progress of a rank; None before its first word."""
        return decode_page(self.page(rank))

    def clear_stacks(self) -> None:
        """Forget the stacks that were written so far."""
        if self._stacks >= 0:
            os.truncate(self._stacks, 0)

    def stacks(self) -> str:
        """Return the stacks that ranks have written since `clear_stacks`."""
        if self._stacks < 0:
            return ""
        data = os.pread(self._stacks, 1 << 16, 0)
        return data.decode(errors="backslashreplace")

    def close(self) -> None:
        """Close it. Ranks that are attached may still write."""
        for descriptor in (self._words, self._stacks):
            if descriptor >= 0:
                os.close(descriptor)
        self._words = self._stacks = -1
