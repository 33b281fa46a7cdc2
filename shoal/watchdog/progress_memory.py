"""The memory of all ranks' progress words, in the process that starts the ranks.

It has no name in any directory: ranks open it by way of /proc, as `shoal.launch.private_memory`.
A second memory of the same kind takes the stacks that ranks write when they are asked for them.
"""

from __future__ import annotations

import os

from shoal.watchdog.progress_word import PAGE_BYTES, RankProgress, decode_page


class ProgressMemory:
    """The words of the ranks of one start on this machine. Systems without memfd have none.

    Args:
        ranks: the number of ranks.

    Attributes:
        path, stacks_path: where ranks open the two memories; None where there is none.
    """

    def __init__(self, ranks: int) -> None:
        self.path: str | None = None
        self.stacks_path: str | None = None
        self._words = self._stacks = -1
        if hasattr(os, "memfd_create"):
            self._words = os.memfd_create("shoal-progress")
            self._stacks = os.memfd_create("shoal-stacks")
            os.truncate(self._words, PAGE_BYTES * ranks)
            self.path, self.stacks_path = (
                f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in (self._words, self._stacks)
            )

    def page(self, rank: int) -> bytes:
        """Return the page of a rank, counted on this machine."""
        if self._words < 0:
            return bytes(PAGE_BYTES)
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
