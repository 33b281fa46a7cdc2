"""The phase board of one host: a memory of each rank, written by that rank and read by all others.

      rank 0's memory    phase 7 | calls 3 | call of each phase | slots  4  5  6  7  0  1  2  3
      rank 1's memory    phase 6 | calls 3 | call of each phase | slots  4  5  6  .  0  1  2  3

A collective is a row of *phases*. In each phase, a rank may write values into the next slot. Then
the rank *publishes*: it stores the signature of its call, and after that raises its phase word. A
rank that sees the phase also sees the values. Phases are counted over all calls of a group, so
nothing has to be reset between calls. A slot is used again when all ranks have read it.

A rank that publishes phase p has read all slots up to phase p - LAG. This is a promise of every
collective in `collectives.py`, and the board needs no other word to know that a slot is free."""

from __future__ import annotations

import ctypes
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shoal.errors import CollectiveFailed
from shoal.shm_backend.call import CallSignature, decode
from shoal.shm_backend.segment import TOKEN_BYTES, Segment, SharedSegment
from shoal.watchdog.progress_writer import CallProgress

# A collective as a generator: each item is a condition and its argument, which must be true before
# the generator may go on.
Steps: TypeAlias = Iterable[tuple[Callable[[Any], bool], Any]]

LAG = 3
SLOTS = 8
# Once all other ranks have published a phase, the slot so many phases later is free again.
MAX_PHASES_AHEAD = SLOTS - LAG
SLOT_BYTES = 1 << 19
# Entries for the calls of phases: more than any rank can be ahead of another.
RING = 2 * SLOTS

# Indices of the 64-bit words at the start of a rank's memory.
PHASE, CALLS, FAILED, SLEEPS, RING_AT = 0, 1, 2, 3, 8
WORDS_BYTES, TEXT_BYTES = 512, 3072
# The segment begins with a token, so this aligns the slots to a page.
SLOTS_AT = 4096 - TOKEN_BYTES
SIZE_BYTES = SLOTS_AT + SLOTS * SLOT_BYTES
MAX_CACHED_LAYOUTS = 1024
# futex(2) of Linux, by ctypes. A sleeper needs no processor time and wakes within microseconds,
# which matters where there are more ranks than cores. On systems without it, a sleep lasts NAP_S.
SYSCALL_NUMBER = (
    {"x86_64": 202, "aarch64": 98}.get(platform.machine(), -1) if sys.platform == "linux" else -1
)
# Arguments of futex(2): two operations, and the number of sleepers to wake.
WAIT, WAKE, ALL = 0, 1, 2**31 - 1
NAP_S = 200e-6


class SlotViews:
    """Flat tensors of one dtype and length that lie in the slots.

    Attributes:
        full: full[slot][rank], the tensor of each rank.
        rows: rows[slot][rank][row], the same tensor divided into one row for each rank. All rows
            have the same length.
    """

    def __init__(self, memories: Sequence[Segment], dtype: torch.dtype, length: int) -> None:
        self.size = len(memories)
        self.dtype = dtype
        self.length = length
        starts = [SLOTS_AT + slot * SLOT_BYTES for slot in range(SLOTS)]
        nonempty = max(length, 1)  # torch.frombuffer refuses a length of 0
        with torch.inference_mode(False):  # later calls outside that mode write into them too
            self.full = [
                [memory.tensor(start, nonempty, dtype)[:length] for memory in memories]
                for start in starts
            ]

    @cached_property  # most collectives need none
    def rows(self) -> list[list[tuple[Tensor, ...]]]:
        return [
            [tensor.view(self.size, self.length // self.size).unbind() for tensor in ranks]
            for ranks in self.full
        ]


class PhaseBoard:
    """One rank's access to the phase board.

    Args:
        rank: index of this rank among the ranks of this host.
        memory: the segment of this rank, of SIZE_BYTES.
        peers: the segments of all other ranks of this host.
        names: ranks as error messages show them; the indices unless given.
        progress: shows the calls to the launcher; None for a board that shows none.

    Attributes:
        phase: the last phase that this rank has published.
        call, word: the signature of the present call, and its encoding.
    """

    def __init__(
        self,
        rank: int,
        memory: SharedSegment,
        peers: Mapping[int, Segment],
        names: Sequence[int] | None = None,
        progress: CallProgress | None = None,
    ) -> None:
        self.rank = rank
        self.progress = progress
        self.size = len(peers) + 1
        self.names = list(names or range(self.size))
        self.memories: list[Segment] = [peers.get(r, memory) for r in range(self.size)]
        self.words = [m.raw(0, WORDS_BYTES).cast("q") for m in self.memories]
        self._self_words = self.words[rank]
        self._peer_words = [(r, words) for r, words in enumerate(self.words) if r != rank]
        self._phase_addresses = [m.head_address(8 * PHASE) for m in self.memories]
        self._views: dict[tuple[torch.dtype, int], SlotViews] = {}
        self._last_views = SlotViews(self.memories, torch.uint8, 1)
        self._fence_lock = threading.Lock()
        self._fence_lock.acquire()
        self.phase = 0
        self.call = CallSignature("barrier")
        self.word = 0

    @property
    def calls(self) -> int:
        """The number of calls that this rank has started."""
        return self._self_words[CALLS]

    def close(self) -> None:
        """Let go of the memory of all ranks. The board cannot be used afterwards."""
        self._views.clear()
        self._last_views = SlotViews((), torch.uint8, 0)
        self.words.clear()
        self._peer_words.clear()
        self.memories.clear()
        self._self_words = memoryview(bytearray(WORDS_BYTES)).cast("q")

    def begin(self, call: CallSignature, word: int) -> None:
        """Start a call. `word` is the encoding of `call`, which callers cache."""
        self.call = call
        self.word = word
        self.resync_phase()
        self._self_words[CALLS] += 1
        if self.progress is not None:
            self.progress.begin(self.calls, word)

    def slot_views(self, dtype: torch.dtype, length: int) -> SlotViews:
        """Return tensors in the slots, of at most SLOT_BYTES each."""
        last = self._last_views
        # All slices of a tensor but the last one have the same length.
        if last.length == length and last.dtype is dtype:
            return last
        views = self._views.get((dtype, length))
        if views is None:
            if len(self._views) >= MAX_CACHED_LAYOUTS:
                self._views.clear()
            views = self._views[dtype, length] = SlotViews(self.memories, dtype, length)
        self._last_views = views
        return views

    def slot_tensors(self, like: Tensor, phase: int) -> list[Tensor]:
        """Return the slot of each rank in `phase`, with the dtype and length of `like`."""
        return self.slot_views(like.dtype, like.numel()).full[phase % SLOTS]

    def publish(self) -> None:
        """Publish the next phase, with the values that this rank has written into its slot."""
        phase = self.phase + 1
        self._self_words[RING_AT + phase % RING] = self.word
        self._memory_fence()
        self._self_words[PHASE] = self.phase = phase
        self._wake()

    def resync_phase(self) -> None:
        """Read this rank's phase again, after compiled code has published phases."""
        self.phase = self._self_words[PHASE]

    def all_at_phase(self, phase: int) -> bool:
        """Return True if all other ranks have published `phase`, in any call."""
        for _, words in self._peer_words:  # noqa: SIM110 - a generator expression is slower
            if words[PHASE] < phase:
                return False
        return True

    def all_reached(self, phase: int) -> bool:
        """Return True if all other ranks have published `phase` in the same call as this rank.

        Raises: CollectiveFailed: another rank makes another call.
        """
        for _, words in self._peer_words:
            if words[PHASE] < phase:
                return False
        self._memory_fence()
        index = RING_AT + phase % RING
        for rank, words in self._peer_words:
            if words[index] != self.word:
                raise self.mismatch(rank, words[index])
        return True

    def has_reached(self, phase_and_rank: tuple[int, int]) -> bool:
        """Return True if one other rank has published a phase in the same call as this rank.

        Raises: CollectiveFailed: that rank makes another call.
        """
        phase, rank = phase_and_rank
        words = self.words[rank]
        if words[PHASE] < phase:
            return False
        self._memory_fence()
        if words[RING_AT + phase % RING] != self.word:
            raise self.mismatch(rank, words[RING_AT + phase % RING])
        return True

    def not_arrived(self, phase: int) -> list[int]:
        """Return the ranks that have not published `phase`."""
        return [rank for rank, words in self._peer_words if words[PHASE] < phase]

    def calls_of(self, rank: int) -> int:
        """Return the number of calls that another rank has started."""
        return self.words[rank][CALLS]

    def mismatch(self, rank: int, word: int) -> CollectiveFailed:
        """Return the error for a rank that makes another call, whose encoding is `word`."""
        return CollectiveFailed(
            f"rank {self.names[self.rank]} calls {self.call.describe()} where rank "
            f"{self.names[rank]} calls {decode(word).describe()} (call {self.calls} of a group of "
            f"ranks {self.names}). All ranks of a group must make the same calls in the same "
            "order, with as many numbers of the same type. Nothing was reduced."
        )

    def fail(self, text: str) -> None:
        """Publish that this rank gives up. `text` is the reason; only the first one is stored."""
        data = text.encode()[:TEXT_BYTES]
        if self._self_words[FAILED] == 0:
            self.memories[self.rank].raw(WORDS_BYTES, TEXT_BYTES)[: len(data)] = data
            self._memory_fence()
            self._self_words[FAILED] = max(len(data), 1)
            self._wake()

    def failure(self) -> tuple[int, str] | None:
        """Return the first rank that gave up and its reason; None if no rank did."""
        for rank, words in self._peer_words:
            if length := words[FAILED]:
                self._memory_fence()
                text = bytes(self.memories[rank].raw(WORDS_BYTES, length))
                return rank, text.decode(errors="replace")
        return None

    def sleep(self, phase: int, limit_s: float, rank: int | None = None) -> None:
        """Sleep until a rank that has not published `phase` publishes something or gives up.

        The sleep may end earlier, so the caller must test its condition again.

        Args:
            limit_s: the longest sleep.
            rank: the rank to wait for; None for all.
        """
        self._self_words[SLEEPS] = 1
        self._memory_fence()
        for peer, words in self._peer_words:
            seen = words[PHASE]
            is_late = seen < phase and not words[FAILED]
            if is_late and rank in (None, peer):
                # The kernel compares the word with `seen`, so a phase that is published between
                # these two lines is not missed.
                futex_wait(self._phase_addresses[peer], seen, limit_s)
                break
        self._self_words[SLEEPS] = 0

    def _wake(self) -> None:
        """Wake the ranks that sleep on this rank's phase."""
        self._memory_fence()
        for _, words in self._peer_words:
            if words[SLEEPS]:
                futex_wake(self._phase_addresses[self.rank])
                break

    def _memory_fence(self) -> None:
        """Order memory accesses: those before this call happen before those after it.

        Some processors (ARM) reorder them otherwise. Python has no fence, but releasing and
        acquiring a lock is one.
        """
        self._fence_lock.release()
        self._fence_lock.acquire()


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _syscall() -> Callable[..., Any] | None:
    if SYSCALL_NUMBER < 0:
        return None
    function = ctypes.CDLL(None, use_errno=True).syscall
    # system call number, address, operation, value, time-out
    function.argtypes = (
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_void_p,
    )
    function.restype = ctypes.c_long
    return function


_FUTEX = _syscall()  # None on systems without futex


def futex_wait(address: int, value: int, limit_s: float) -> None:
    """Sleep until woken, or for `limit_s`. Return at once if the word no longer has `value`.

    The kernel compares the lowest 32 bits and falls asleep in one step, so no wake is lost.
    """
    if _FUTEX is None:
        time.sleep(min(NAP_S, limit_s))
        return
    limit = _Timespec(int(limit_s), int(limit_s % 1 * 1e9))
    # ctypes releases the interpreter's lock in the call: other threads can run.
    _FUTEX(SYSCALL_NUMBER, address, WAIT, value & 0xFFFFFFFF, ctypes.addressof(limit))


def futex_wake(address: int) -> int:
    """Wake all processes and threads that sleep on a word.

    Returns: the number of sleepers; 0 on systems without futex.
    """
    return 0 if _FUTEX is None else int(_FUTEX(SYSCALL_NUMBER, address, WAKE, ALL, None))
