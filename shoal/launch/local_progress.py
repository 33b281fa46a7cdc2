"""The progress of ranks on this machine, and their stacks.

Ranks write their stacks into memory of this process when they get STACKS_SIGNAL, also while they
sleep or are in C with the interpreter locked. A stopped process writes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from shoal.launch.rank import STACKS_SIGNAL
from shoal.launch.rank_set import Halt, Look, RankHandle
from shoal.platform.processes import PROC, process_state
from shoal.watchdog.look_clock import LookClock
from shoal.watchdog.progress_memory import ProgressMemory
from shoal.watchdog.progress_writer import now_ns

STACK_LIMIT_S = 1.0
STATES = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "in the kernel (disk?)"}
OUTER_FRAMES = ("<frozen runpy>", "shoal/launch/rank.py", "/multiprocessing/", '"<string>"')


class LocalProgress:
    """The words of this machine's ranks; a ProgressSource.

    Args:
        alive: returns the ranks that have not ended.
        world: the number of ranks.
        memory: of their words.
        hang_limit_s: the limit after which a rank is late; 0 for none.
    """

    def __init__(
        self,
        alive: Callable[[], Sequence[RankHandle]],
        world: int,
        memory: ProgressMemory,
        hang_limit_s: float,
    ) -> None:
        self.world = world
        self.hang_limit_s = hang_limit_s
        self._alive = alive
        self._memory = memory
        self._clock = LookClock()

    def look(self) -> Look:
        """Return the progress of the ranks that live."""
        alive = self._alive()
        pages = {rank.number: self._memory.read(rank.number) for rank in alive}
        progress = {rank: each for rank, each in pages.items() if each is not None}
        passed_s = self._clock.passed_s(now_ns() * 1e-9)
        return Look(progress, dict.fromkeys(progress, passed_s), _halt(alive))

    def page(self, rank: int) -> bytes:
        """Return the page of a rank."""
        return self._memory.page(rank)

    def name_slow(self, rank: int) -> None:
        """Let the ranks know that one of them is slow, for their log."""
        self._memory.name_slow(rank)

    def host(self, rank: int) -> str:
        """Return nothing: there is one host."""
        return ""

    def stacks(self, rank: int) -> str:
        """Return the stacks of all threads of a rank, with a first line, or why there are none."""
        for handle in self._alive():
            if handle.number == rank:
                return self._stacks(handle)
        return f"rank {rank} has ended."

    def _stacks(self, rank: RankHandle) -> str:
        self._memory.clear_stacks()
        rank.signal(STACKS_SIGNAL)
        text, limit_s = "", time.monotonic() + STACK_LIMIT_S
        while time.monotonic() < limit_s:
            time.sleep(0.05)
            before, text = text, self._memory.stacks()
            if text and text == before:
                break
        state = process_state(rank.pid)
        where = f"process {rank.pid}, {STATES.get(state or '', 'alive')}{_kernel_place(rank.pid)}"
        if not text:
            return f"rank {rank.number} ({where}) has not written its stack."
        return f"The stack of rank {rank.number} ({where}):\n{_own_frames(text)}"


def _halt(ranks: Sequence[RankHandle]) -> Halt:
    states = [process_state(rank.pid) for rank in ranks]
    if "t" in states:
        return "traced"
    return "stopped" if states and all(state == "T" for state in states) else ""


def _own_frames(text: str) -> str:
    """Return the stacks without the frames that have started the rank."""
    lines = text.rstrip().splitlines()
    return "\n".join(line for line in lines if not any(part in line for part in OUTER_FRAMES))


def _kernel_place(pid: int) -> str:
    with suppress(OSError):
        place = (PROC / str(pid) / "wchan").read_text().strip()
        return f", in the kernel's {place}" if place not in ("", "0") else ""
    return ""
