"""Where the ranks of one host meet: every rank's memory, which it alone writes and all others read.

      rank 0's memory    phase 7 | calls 3 | call of each phase | slots  4  5  6  7  0  1  2  3
      rank 1's memory    phase 6 | calls 3 | call of each phase | slots  4  5  6  .  0  1  2  3

A collective is a row of *phases*. In each, a rank writes numbers into the next slot, or nothing,
and *publishes*: it notes which call it is in, then raises its phase. Whoever sees the phase sees
the numbers. Phases are counted over all calls of a group, so that nothing needs to be reset, and a
slot is used again when all ranks have read it.

What has been read: a rank that publishes phase p has read everything up to phase p - LAG. This is a
promise of every collective in `collectives.py`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shoal.errors import CollectiveFailed
from shoal.shm_backend.call import CallSignature, decode
from shoal.shm_backend.futex import futex_wait, futex_wake
from shoal.shm_backend.segment import TOKEN_BYTES, AttachedSegment, SharedSegment

Steps: TypeAlias = Iterable[
    tuple[Callable[[Any], bool], Any]
]  # of a call: what must be true before each
LAG = 3
SLOTS = 8
MAX_PHASES_AHEAD = (
    SLOTS - LAG
)  # what all others have published so many phases ago has been read, and its slot is free again
SLOT_BYTES = 1 << 19
RING = 2 * SLOTS  # of calls: more than any rank can be ahead of another
PHASE, CALLS, FAILED, SLEEPS, RING_AT = 0, 1, 2, 3, 8
WORDS_BYTES, TEXT_BYTES = 512, 3072
SLOTS_AT = 4096 - TOKEN_BYTES
SIZE_BYTES = SLOTS_AT + SLOTS * SLOT_BYTES
LAYOUTS = 1024


class Layout:
    """Flat tensors of one dtype and length in the slots.

    Attributes: whole: whole[slot][rank], each rank's. rows: rows[slot][rank][row], where it is cut
        into as many rows of one length as there are ranks. bounds: where it is cut into as many
        pieces, each beginning on a cache line; the last ones may be empty. pieces:
        pieces[slot][rank][piece].
    """

    def __init__(
        self, memories: Sequence[SharedSegment | AttachedSegment], dtype: torch.dtype, length: int
    ) -> None:
        self.size, self.dtype, self.length = len(memories), dtype, length
        at = [SLOTS_AT + slot * SLOT_BYTES for slot in range(SLOTS)]
        some = max(length, 1)  # torch makes no tensor of nothing from memory
        self.whole = [
            [memory.tensor(start, some, dtype)[:length] for memory in memories] for start in at
        ]
        step = -(-length // (self.size * 64)) * 64
        self.bounds = [
            (min(step * piece, length), min(step * (piece + 1), length))
            for piece in range(self.size)
        ]

    @cached_property
    def rows(self) -> list[list[tuple[Tensor, ...]]]:
        return [
            [whole.view(self.size, self.length // self.size).unbind() for whole in ranks]
            for ranks in self.whole
        ]

    @cached_property
    def pieces(self) -> list[list[list[Tensor]]]:
        return [[[whole[a:b] for a, b in self.bounds] for whole in ranks] for ranks in self.whole]


class PhaseBoard:
    """One rank's end of the meeting.

    Args:
        rank: in this group and on this host, as all ranks here count.
        memory: this rank's own, of SIZE_BYTES.
        others: the memory of every other rank.
        names: what ranks are called in messages; their own numbers unless given.

    Attributes:
        phase: the last that this rank has published.
        call: the one that it is in, and its `word`.
    """

    def __init__(
        self,
        rank: int,
        memory: SharedSegment,
        others: Mapping[int, AttachedSegment],
        names: Sequence[int] | None = None,
    ) -> None:
        self.rank, self.size = rank, len(others) + 1
        self.names = list(names or range(self.size))
        self.memories: list[SharedSegment | AttachedSegment] = [
            others.get(r, memory) for r in range(self.size)
        ]
        self.words = [m.raw(0, WORDS_BYTES).cast("q") for m in self.memories]
        self._mine = self.words[rank]
        self._others = [(r, words) for r, words in enumerate(self.words) if r != rank]
        self._phase_at = [m.head_address(8 * PHASE) for m in self.memories]
        self._layouts: dict[tuple[torch.dtype, int], Layout] = {}
        self._last = Layout(self.memories, torch.uint8, 1)
        self._barrier = threading.Lock()
        self._barrier.acquire()
        self.phase, self.calls, self.call, self.word = 0, 0, CallSignature("barrier"), 0

    def begin(self, call: CallSignature, word: int) -> None:
        """From now on this rank is in `call`, whose `word` it is."""
        self.call, self.word = call, word
        self.calls += 1
        self._mine[CALLS] = self.calls

    def layout(self, dtype: torch.dtype, length: int) -> Layout:
        """Tensors in the slots, of at most SLOT_BYTES."""
        last = self._last
        if (
            last.length == length and last.dtype is dtype
        ):  # as for all slices of a tensor but the last one
            return last
        found = self._layouts.get((dtype, length))
        if found is None:
            if len(self._layouts) >= LAYOUTS:
                self._layouts.clear()
            found = self._layouts[dtype, length] = Layout(self.memories, dtype, length)
        self._last = found
        return found

    def peer_slots(self, like: Tensor, phase: int) -> list[Tensor]:
        """Where each rank shows a tensor of this dtype and length in this phase."""
        return self.layout(like.dtype, like.numel()).whole[phase % SLOTS]

    def publish(self) -> None:
        """What this rank has written for the next phase is there."""
        phase = self.phase + 1
        self._mine[RING_AT + phase % RING] = self.word
        self._memory_fence()
        self._mine[PHASE] = self.phase = phase
        self._wake()

    def resync_phase(self) -> None:
        """Somebody else has published in this rank's name."""
        self.phase = self._mine[PHASE]

    def all_at_phase(self, phase: int) -> bool:
        """Whether all others have published this phase, of whatever call."""
        for _, words in self._others:  # noqa: SIM110 - a generator would take longer than the question
            if words[PHASE] < phase:
                return False
        return True

    def all_reached(self, phase: int) -> bool:
        """Whether all others have published this phase of the same call.

        Raises: CollectiveFailed: one of them has called something else.
        """
        for _, words in self._others:
            if words[PHASE] < phase:
                return False
        self._memory_fence()
        at = RING_AT + phase % RING
        for rank, words in self._others:
            if words[at] != self.word:
                raise self.mismatch(rank, words[at])
        return True

    def has_reached(self, which: tuple[int, int]) -> bool:
        """The same of one other rank: (phase, rank)."""
        phase, rank = which
        words = self.words[rank]
        if words[PHASE] < phase:
            return False
        self._memory_fence()
        if words[RING_AT + phase % RING] != self.word:
            raise self.mismatch(rank, words[RING_AT + phase % RING])
        return True

    def not_arrived(self, phase: int) -> list[int]:
        """Who has not published this phase."""
        return [rank for rank, words in self._others if words[PHASE] < phase]

    def calls_of(self, rank: int) -> int:
        """How many calls another rank has made."""
        return self.words[rank][CALLS]

    def mismatch(self, rank: int, word: int) -> CollectiveFailed:
        """The error that another rank has called something else."""
        return CollectiveFailed(
            f"rank {self.names[self.rank]} calls {self.call.describe()} where rank "
            f"{self.names[rank]} calls "
            f"{decode(word).describe()} (call {self.calls} of a group of ranks {self.names}). All "
            "ranks of a group must "
            "make the same calls in the same order, with as many numbers of the same type. Nothing "
            "was reduced."
        )

    def fail(self, text: str) -> None:
        """Tell all others that this rank gives up, and why."""
        data = text.encode()[:TEXT_BYTES]
        if self._mine[FAILED] == 0:
            self.memories[self.rank].raw(WORDS_BYTES, TEXT_BYTES)[: len(data)] = data
            self._memory_fence()
            self._mine[FAILED] = max(len(data), 1)
            self._wake()

    def failure(self) -> tuple[int, str] | None:
        """Who gave up, and why."""
        for rank, words in self._others:
            if length := words[FAILED]:
                self._memory_fence()
                return rank, bytes(self.memories[rank].raw(WORDS_BYTES, length)).decode(
                    errors="replace"
                )
        return None

    def sleep(self, phase: int, limit_s: float, rank: int | None = None) -> None:
        """Sleep until a rank that has not published `phase` publishes something or gives up; it may
        be less.

        Args: rank: who is waited for; None for all.
        """
        self._mine[SLEEPS] = 1
        self._memory_fence()
        for other, words in self._others:
            late = (seen := words[PHASE]) < phase and not words[FAILED]
            if late and rank in (None, other):
                futex_wait(self._phase_at[other], seen, limit_s)
                break
        self._mine[SLEEPS] = 0

    def _wake(self) -> None:
        """Whoever has begun to sleep before it could see what is published now."""
        self._memory_fence()
        for _, words in self._others:
            if words[SLEEPS]:
                futex_wake(self._phase_at[self.rank])
                break

    def _memory_fence(self) -> None:
        """What was written before is seen before what is written after, and likewise what is read.

        Some processors (ARM) need to be told; to give back a semaphore and to take it does.
        """
        self._barrier.release()
        self._barrier.acquire()
