"""What two ranks of a host say to each other: a ring of bytes in each one's memory, which the other reads.

      rank 0's end    sent 192 | taken 0   | ring  [head a0 a1 a2][head b0]........................
      rank 1's end    sent 0   | taken 128 | ring  ................................................

A message is one slice or several. Each has a head: whose tag, of what type, how long the whole is, how long this slice.
Slices lie one behind the other; what would not fit before the ring's end begins at its start, and so does what comes
into an empty ring, for there the memory is warm. Everybody writes into its own memory alone: the bytes that it has
sent, and how many of the other's it has taken.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, uint8

from shoal.comm.backend.bell import ROOM, SLICES, Bell
from shoal.comm.backend.directory import Directory
from shoal.comm.memory import TOKEN_BYTES, Attached, Memory
from shoal.errors import CollectiveFailed

SENT, TAKEN, OPENED, FAILED = 0, 1, 2, 3
WORDS_BYTES, TEXT_BYTES = 512, 3072
RING_AT = 4096 - TOKEN_BYTES
RING_BYTES = 1 << 22
SLICE_BYTES = 1 << 18
HALF = RING_BYTES // 2
HEAD_BYTES = 64
ELSEWHERE = -1  # instead of a length: go on at the start of the ring


class Head(NamedTuple):
    """What precedes a slice: all of it in bytes."""

    slice_bytes: int
    tag: int
    dtype: int
    size_bytes: int
    begins: int


class Channel:
    """One rank's view of it.

    Args: other: the rank at the other end, among those of the host.

    Attributes:
        sent: bytes sent, heads and gaps too.
    """

    def __init__(self, other: int, directory: Directory, bell: Bell) -> None:
        self.other, self._directory, self._bell = other, directory, bell
        try:
            self._memory = Memory(RING_AT + RING_BYTES)
        except OSError as error:
            raise CollectiveFailed(
                f"{RING_BYTES >> 20} MiB of shared memory for messages could not be had: {error}. Every pair of ranks "
                "that talks needs as much and, until both have come, a file descriptor (ulimit -n)."
            ) from error
        self._words = self._memory.raw(0, WORDS_BYTES).cast("q")
        self._heads = self._memory.raw(RING_AT, RING_BYTES).cast("q")
        self._ring = self._memory.tensor(RING_AT, RING_BYTES, uint8)
        self._their_memory: Attached | None = None
        self._is_found = False  # by the other
        self.sent, self._taken = 0, 0
        directory.announce(other, self._memory)

    @property
    def is_open(self) -> bool:
        """Whether the other rank's end is in reach."""
        if self._their_memory is not None:
            return True
        memory = self._directory.find(self.other)
        if memory is None:
            return False
        self._their_words = memory.raw(0, WORDS_BYTES).cast("q")
        self._their_heads = memory.raw(RING_AT, RING_BYTES).cast("q")
        self._their_ring = memory.tensor(RING_AT, RING_BYTES, uint8)
        self._their_memory = memory
        self._words[OPENED] = 1
        return True

    @property
    def taken(self) -> int:
        """How many of this rank's bytes the other one has taken."""
        if not self.is_open:
            return 0
        if not self._is_found and self._their_words[OPENED]:
            self._memory.close()
            self._is_found = True
        return self._their_words[TAKEN]

    @property
    def is_found(self) -> bool:
        """Whether the other rank has opened this end: it can read the ring even when this rank has ended."""
        return self._is_found

    def put(self, head: Head, data: Tensor) -> bool:
        """Send a slice, if there is room. Args: data: (head.slice_bytes,), uint8."""
        needed, taken, at = HEAD_BYTES + _whole_lines(head.slice_bytes), self.taken, self.sent % RING_BYTES
        warm = taken == self.sent and at > SLICE_BYTES
        gap = RING_BYTES - at if warm or at + needed > RING_BYTES else 0
        if self.sent + gap + needed - taken > RING_BYTES:
            return False
        if gap:
            self._heads[at // 8] = ELSEWHERE
            at = 0
        word, begin = at // 8, at + HEAD_BYTES
        heads = self._heads
        heads[word], heads[word + 1], heads[word + 2], heads[word + 3], heads[word + 4] = head
        if head.slice_bytes:
            self._ring[begin : begin + head.slice_bytes].copy_(data)
        self._bell.order()
        self.sent += gap + needed
        self._words[SENT] = self.sent
        self._bell.ring(self.other, SLICES)
        return True

    def coming(self) -> Head | None:
        """The head of the next slice, if there is one."""
        if not self.is_open or self._their_words[SENT] <= self._taken:
            return None
        self._bell.order()
        at = self._taken % RING_BYTES
        if self._their_heads[at // 8] == ELSEWHERE:
            self._taken += RING_BYTES - at
            at = 0
        return Head(*self._their_heads[at // 8 : at // 8 + len(Head._fields)])

    def take(self, head: Head, into: Tensor, ends: bool) -> None:
        """Copy the slice that comes, and give its room back. Args: into: (head.slice_bytes,), uint8. ends: it."""
        begin, before = self._taken % RING_BYTES + HEAD_BYTES, self._taken
        if head.slice_bytes:
            into.copy_(self._their_ring[begin : begin + head.slice_bytes])
        self._bell.order()
        self._taken += HEAD_BYTES + _whole_lines(head.slice_bytes)
        self._words[TAKEN] = self._taken
        # Not for every slice: whoever waits for room is woken for much of it.
        if ends or self._taken // HALF > before // HALF or self._taken == self._their_words[SENT]:
            self._bell.ring(self.other, ROOM)

    def fail(self, text: str) -> None:
        """Tell the other rank that this one gives up, and why."""
        data = text.encode()[:TEXT_BYTES]
        if not self._words[FAILED]:
            self._memory.raw(WORDS_BYTES, TEXT_BYTES)[: len(data)] = data
            self._bell.order()
            self._words[FAILED] = max(len(data), 1)
            self._bell.ring(self.other, SLICES | ROOM)

    def failure(self) -> str | None:
        """Why the other rank gave up, if it did."""
        if not self.is_open or not (length := self._their_words[FAILED]):
            return None
        self._bell.order()
        assert self._their_memory is not None
        return bytes(self._their_memory.raw(WORDS_BYTES, length)).decode(errors="replace")

    def close(self) -> None:
        """Nobody can open this end any more; who has, can read on."""
        self._memory.close()


def _whole_lines(size_bytes: int) -> int:
    return -(-size_bytes // HEAD_BYTES) * HEAD_BYTES
