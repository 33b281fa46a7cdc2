"""Where each rank's end of a channel is found: a line for every neighbour, in the memory where the host's ranks meet.

      rank 1's memory    ... slots │ for rank 0: descriptor, token │ for rank 1: - │ for rank 2: none yet │ ...

A line is written when a rank first sends to another or waits for it: ranks that never talk have no memory for it.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal.comm.backend.bell import Bell
from shoal.comm.backend.exchange import END_BYTES, ENDS_AT
from shoal.comm.memory import TOKEN_BYTES, Attached, Memory, attach


class Directory:
    """One rank's lines, and those of the others that are for it.

    Args: rank: among the ranks of the host. pids: processes of the others.
    """

    def __init__(
        self, rank: int, memory: Memory, others: Mapping[int, Attached], pids: Mapping[int, int], bell: Bell
    ) -> None:
        self._rank, self._memory, self._others, self._pids, self._bell = rank, memory, others, pids, bell
        self._lines = {other: m.raw(ENDS_AT + rank * END_BYTES, END_BYTES) for other, m in others.items()}

    def announce(self, other: int, end: Memory) -> None:
        """Let another rank find the memory of this one's end."""
        description, line = end.description, self._memory.raw(ENDS_AT + other * END_BYTES, END_BYTES)
        words = line[: END_BYTES - TOKEN_BYTES].cast("q")
        line[END_BYTES - TOKEN_BYTES :] = str(description["token"]).encode()
        words[1], words[2] = description["fd"], description["bytes"]
        self._bell.order()
        words[0] = 1

    def is_there(self, other: int) -> bool:
        """Whether another rank has made an end for this one."""
        return bool(self._lines[other][0])

    def find(self, other: int) -> Attached | None:
        """The memory of another rank's end; None where there is none, or where its process has ended."""
        if not self.is_there(other):
            return None
        self._bell.order()
        line = self._lines[other]
        words = line[: END_BYTES - TOKEN_BYTES].cast("q")
        token = bytes(line[END_BYTES - TOKEN_BYTES :]).decode()
        return attach({"pid": self._pids[other], "fd": words[1], "bytes": words[2], "token": token})
