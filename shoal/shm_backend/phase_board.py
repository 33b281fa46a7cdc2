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
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from shoal.errors import CollectiveFailed
from shoal.platform.tensors import DTYPE_NUMBERS, DTYPES
from shoal.shm_backend.segment import TOKEN_BYTES, Segment, SharedSegment
from shoal.watchdog.progress_word import COLLECTIVES
from shoal.watchdog.progress_writer import CallProgress

OPERATIONS = ("", "sum", "avg", "product", "min", "max")
MAX_RANKS = 1 << 10


class CallSignature(NamedTuple):
    """A collective as all ranks must call it.

    Args:
        kind: one of COLLECTIVES.
        dtype: of the elements.
        length: elements on each rank; 0 for a call in which ranks may differ in it.
        operation: one of OPERATIONS; "" if nothing is reduced.
        root: rank in the group, for calls that have a root.
    """

    kind: str
    dtype: torch.dtype = torch.uint8
    length: int = 0
    operation: str = ""
    root: int = 0

    @property
    def encoded(self) -> int:
        """Encode this call as an integer below 2**63, which all ranks compare.

        bits   0-4    5-8         9-14    15-24   25-62
               kind   operation   dtype   root    elements on each rank
        """
        return (
            COLLECTIVES.index(self.kind)
            | OPERATIONS.index(self.operation) << 5
            | DTYPE_NUMBERS[self.dtype] << 9
            | self.root << 15
            | (self.length & (1 << 38) - 1) << 25
        )

    def describe(self) -> str:
        """Describe this call for error messages, such as `all_reduce(1,000 x float32, sum)`."""
        if self.kind == "barrier":
            return "barrier()"
        arguments = [str(self.dtype)]
        if self.length:
            arguments = [f"{self.length:,} x {str(self.dtype).removeprefix('torch.')}"]
        if self.operation:
            arguments.append(self.operation)
        if self.kind == "broadcast":
            arguments.append(f"root {self.root}")
        return f"{self.kind}({', '.join(arguments)})"


@lru_cache(4096)
def signature(
    kind: str, dtype: torch.dtype, length: int, operation: str = "", root: int = 0
) -> tuple[CallSignature, int]:
    """Return a signature and its encoding."""
    call = CallSignature(kind, dtype, length, operation, root)
    return call, call.encoded


def decode(word: int) -> CallSignature:
    """Decode a word of `CallSignature.encoded`.

    A damaged word gives some signature and no error, because the result is for an error message.
    """
    return CallSignature(
        COLLECTIVES[(word & 31) % len(COLLECTIVES)],
        DTYPES[(word >> 9 & 63) % len(DTYPES)],
        word >> 25,
        OPERATIONS[(word >> 5 & 15) % len(OPERATIONS)],
        word >> 15 & MAX_RANKS - 1,
    )


# A collective as a generator: each item is a condition and its argument, which must be true before
# the generator may go on.
Steps: TypeAlias = Iterable[tuple[Callable[[Any], bool], Any]]
SlotTensors: TypeAlias = list[list[Tensor]]
"""Tensors of one dtype and length that lie in the slots: of each slot, that of each rank."""

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
# which matters where there are more ranks than cores. Its number is 98 on all newer processors.
SYSCALL_NUMBER = 202 if platform.machine() == "x86_64" else 98
# Arguments of futex(2): two operations, and the number of sleepers to wake.
WAIT, WAKE, ALL = 0, 1, 2**31 - 1


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
        self._slots: dict[tuple[torch.dtype, int], SlotTensors] = {}
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
        self._slots.clear()
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

    def slots(self, dtype: torch.dtype, length: int) -> SlotTensors:
        """Return flat tensors in the slots, of at most SLOT_BYTES each."""
        found = self._slots.get((dtype, length))
        if found is not None:
            return found
        if len(self._slots) >= MAX_CACHED_LAYOUTS:
            self._slots.clear()
        starts = [SLOTS_AT + slot * SLOT_BYTES for slot in range(SLOTS)]
        nonempty = max(length, 1)  # torch.frombuffer refuses a length of 0
        made = self._slots[dtype, length] = [
            [memory.tensor(start, nonempty, dtype)[:length] for memory in self.memories]
            for start in starts
        ]
        return made

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


@cache
def _syscall() -> Callable[..., Any]:
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


def futex_wait(address: int, value: int, limit_s: float) -> None:
    """Sleep until woken, or for `limit_s`. Return at once if the word no longer has `value`.

    The kernel compares the lowest 32 bits and falls asleep in one step, so no wake is lost.
    """
    limit = _Timespec(int(limit_s), int(limit_s % 1 * 1e9))
    # ctypes releases the interpreter's lock in the call: other threads can run.
    _syscall()(SYSCALL_NUMBER, address, WAIT, value & 0xFFFFFFFF, ctypes.addressof(limit))


def futex_wake(address: int) -> int:
    """Wake all processes and threads that sleep on a word. Return their number."""
    return int(_syscall()(SYSCALL_NUMBER, address, WAKE, ALL, None))
