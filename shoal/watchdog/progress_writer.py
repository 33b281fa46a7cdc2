"""The writer of a rank's progress word.

A rank of Shoal's launcher is attached to its page before its program begins. In every other process
all methods return at once. So the code of the strategies and of the backend calls them without a
condition.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from shoal.watchdog.progress_word import (
    CALL,
    CALL_AT,
    COUNT,
    EVENT,
    FIRST,
    GROUPS_AT,
    LENGTH,
    MAX_GROUPS,
    MAX_TEXT_BYTES,
    NO_KIND,
    NUMBER,
    PAGE_BYTES,
    RING_AT,
    SINCE,
    SINCE_AT,
    STEP,
    STEP_AT,
    STEPS,
    TEXT_AT,
    THREAD_WAITS,
    WAITS,
    Phase,
    group_id,
)

CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
KIND_MASK, LENGTH_SHIFT = 31, 25  # of the signature of a collective (shoal/shm_backend/call.py)


def now_ns() -> int:
    """Return the time on the clock of the words, which goes on while the host is suspended."""
    return time.clock_gettime_ns(CLOCK)


class ProgressWriter:
    """Writes the page of this process. `own_progress` returns the only one.

    Attributes:
        memory: the page; None in a process that is no rank of Shoal's launcher.
        hang_limit_s: the limit after which the launcher calls a rank late; 0 without one.
    """

    def __init__(self) -> None:
        self.memory: memoryview | None = None
        self.hang_limit_s = 0.0
        self._phase = Phase.START
        self._flags = 0
        self._step = 0
        self._waited_ns = self._data_ns = 0
        self._step_started = (0, 0, 0)
        self._groups: dict[int, list[int]] = {}
        self._slots: dict[int, int] = {}
        self._stage = 0
        self._shapes: set[object] = set()
        self._main_thread = 0
        self._main_waits = self._thread_waits = 0
        self._lock = threading.Lock()

    def attach(self, path: str, rank: int, hang_limit_s: float) -> None:
        """Write to the page of `rank` in the memory at `path` from now on. Main thread only."""
        with suppress(OSError), open(path, "r+b") as file:
            view = memoryview(mmap.mmap(file.fileno(), 0))
            self.memory = view[PAGE_BYTES * rank : PAGE_BYTES * (rank + 1)]
            self._main_thread = threading.get_ident()
            CALL.pack_into(self.memory, CALL_AT, 0, 0, NO_KIND, -1, 0)
            self._flags = FIRST
            self._mark()
        self.hang_limit_s = hang_limit_s

    def detach(self) -> None:
        """Write nothing any more: a forked process is not the rank."""
        self.memory = None

    def enter(self, phase: Phase) -> None:
        """Say that the rank is in `phase` from now on. Again in the same phase: that it goes on."""
        if self.memory is None:
            return
        self._phase = phase
        EVENT.pack_into(self.memory, SINCE_AT, now_ns(), phase, self._flags)

    def touch(self) -> None:
        """Say that the phase goes on. Nothing is said from other threads than the main one."""
        if threading.get_ident() == self._main_thread:
            self._mark()

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Say so in this context, and the phase before after it."""
        before = self._phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    @contextmanager
    def data(self) -> Iterator[None]:
        """Say that the rank waits for data in this context, and count the time."""
        start_ns = now_ns()
        with self.during(Phase.DATA):
            yield
        self._data_ns += now_ns() - start_ns

    def begin_step(self, shape: object) -> None:
        """Say that the passes of a step begin.

        Args: shape: of the batch; the first step with each shape may take long.
        """
        if self.memory is None:
            return
        if shape not in self._shapes and len(self._shapes) < 1000:
            self._shapes.add(shape)
            self._flags |= FIRST
        self.enter(Phase.FORWARD)

    def end_step(self) -> None:
        """Say that the optimizer has stepped, and write the times of the step."""
        memory = self.memory
        if memory is None:
            return
        now, (began, waited, data) = now_ns(), self._step_started
        self._step += 1
        self._step_started = (now, self._waited_ns, self._data_ns)
        self._flags &= ~FIRST
        if began:
            STEP.pack_into(
                memory,
                RING_AT + STEP.size * (self._step % STEPS),
                self._step,
                now - began,
                self._waited_ns - waited,
                self._data_ns - data,
            )
        NUMBER.pack_into(memory, STEP_AT, self._step)
        self.enter(Phase.BETWEEN)

    def add_waited(self, time_ns: int) -> None:
        """Count time in which this rank waited for others, in any thread."""
        self._waited_ns += time_ns

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Say that the calling thread waits for other ranks in this context."""
        if self.memory is None:
            yield
            return
        is_main = threading.get_ident() == self._main_thread
        self._count_wait(is_main, 1)
        try:
            yield
        finally:
            self._count_wait(is_main, -1)

    @contextmanager
    def message_wait(self, kind: int, peer: int = -1, length: int = 0) -> Iterator[None]:
        """Say that the calling thread waits for a message, or for parameter servers.

        Args:
            kind: SEND, RECV or SERVERS.
            peer: the other global rank; -1 for parameter servers.
        """
        if self.memory is not None:
            CALL.pack_into(self.memory, CALL_AT, 0, 0, kind, peer, length)
        with self.waiting():
            yield

    def join_group(self, label: str, ranks: Sequence[int]) -> CallProgress:
        """Describe a process group of this rank. Return the writer of its calls."""
        number = group_id(label, ranks)
        with self._lock:
            slot = self._slots.setdefault(number, len(self._slots))
            self._groups[number] = list(ranks)
        if slot < MAX_GROUPS and self.memory is not None:
            COUNT.pack_into(self.memory, GROUPS_AT + COUNT.size * slot, number, 0)
        self._describe()
        return CallProgress(self, slot, number)

    def set_stage(self, stage: int) -> None:
        """Describe which stage of a pipeline this rank has."""
        self._stage = stage
        self._describe()

    def _mark(self) -> None:
        if self.memory is not None:
            EVENT.pack_into(self.memory, SINCE_AT, now_ns(), self._phase, self._flags)

    def _count_wait(self, is_main: bool, change: int) -> None:
        with self._lock:
            if is_main:
                self._main_waits += change
            else:
                self._thread_waits += change
            waits = (WAITS if self._main_waits else 0) | (THREAD_WAITS if self._thread_waits else 0)
            self._flags = self._flags & FIRST | waits
            self._mark()

    def _describe(self) -> None:
        if self.memory is None:
            return
        description = {"groups": self._groups, "stage": self._stage}
        text = json.dumps(description).encode()
        if len(text) <= MAX_TEXT_BYTES:
            begin = TEXT_AT + LENGTH.size
            LENGTH.pack_into(self.memory, TEXT_AT, 0)
            self.memory[begin : begin + len(text)] = text
            LENGTH.pack_into(self.memory, TEXT_AT, len(text))


class CallProgress:
    """Writes the collectives of one group."""

    def __init__(self, writer: ProgressWriter, slot: int, group: int) -> None:
        self._writer = writer
        self._group = group
        self._count_at = GROUPS_AT + COUNT.size * min(slot, MAX_GROUPS - 1)
        self._has_slot = slot < MAX_GROUPS

    def begin(self, calls: int, signature: int) -> None:
        """Say that the rank begins a collective.

        Args:
            calls: its number in the group, from 1.
            signature: `CallSignature.encoded`.
        """
        memory = self._writer.memory
        if memory is None:
            return
        if self._has_slot:
            COUNT.pack_into(memory, self._count_at, self._group, calls)
        kind, length = signature & KIND_MASK, signature >> LENGTH_SHIFT
        CALL.pack_into(memory, CALL_AT, calls, self._group, kind, -1, length)
        SINCE.pack_into(memory, SINCE_AT, now_ns())


@functools.cache
def own_progress() -> ProgressWriter:
    """Return the writer of this process."""
    writer = ProgressWriter()
    os.register_at_fork(after_in_child=writer.detach)
    return writer
