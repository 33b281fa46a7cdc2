"""How ranks wake each other for messages: everybody says in its own memory for what it is to be woken.

      events    how many things this rank has published for others
      callers   0 nobody waits    AWAKE: they look by themselves    AWAKE | SLICES | ROOM: asleep, to be woken for these
      thread    0 all is done     SLICES | ROOM: there is something for it to do    ASLEEP | ...: it is asleep

A caller sleeps on the events of the rank that it waits for, and can miss none. The thread and who waits for any rank
sleep on their own number, which nobody else changes: they could miss a ring while they have said that they sleep and do
not yet. So whoever rings for them looks how many it has woken, rings again while it was nobody, and they nap briefly.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from shoal.comm.backend.exchange import WORDS_BYTES
from shoal.comm.backend.sleep import sleep_while, wake
from shoal.comm.memory import Attached, Memory

CALLERS, THREAD, EVENTS = 32, 33, 34  # words of the first page; exchange.py has those before, and from 40 on
SLICES, ROOM, AWAKE, ASLEEP = 1, 2, 4, 8
WHO = 8  # from this bit on: whom a caller waits for, plus 1; 0 for several or any
TRIES = 30  # without yielding, which costs a turn on a busy machine; who is later in bed looks again after a nap


class Bell:
    """One rank's bell, and the way to those of the others on its host.

    Args: rank: among those of the host. memory: its own, where the ranks meet. others: theirs.
    """

    def __init__(self, rank: int, memory: Memory, others: Mapping[int, Attached]) -> None:
        self._rank, self._events = rank, 0
        self._mine = memory.raw(0, WORDS_BYTES).cast("q")
        self._at = {word: memory.head_address(8 * word) for word in (CALLERS, THREAD, EVENTS)}
        self._words = {other: m.raw(0, WORDS_BYTES).cast("q") for other, m in others.items()}
        words = (CALLERS, THREAD, EVENTS)
        self._theirs = {(other, word): m.head_address(8 * word) for other, m in others.items() for word in words}
        self._barrier = threading.Lock()
        self._barrier.acquire()

    def order(self) -> None:
        """What was written before is seen before what is written after. One thread at a time."""
        self._barrier.release()
        self._barrier.acquire()

    def say(self, word: int, state: int) -> None:
        """Note the state of this rank's callers or of its thread. What is published from now on, one is woken for."""
        self._mine[word] = state
        self.order()

    def said(self, word: int) -> int:
        """What was noted last."""
        return self._mine[word]

    def sleep(self, word: int, state: int, limit_s: float) -> None:
        """Sleep until rung for, unless the state is another one by now."""
        sleep_while(self._at[word], state, limit_s)

    def events(self, other: int) -> int:
        """How many things another rank has published by now."""
        return self._words[other][EVENTS]

    def sleep_on(self, other: int, events: int, limit_s: float) -> None:
        """Sleep until another rank publishes more than it had."""
        sleep_while(self._theirs[other, EVENTS], events, limit_s)

    def wake_own(self, word: int) -> None:
        """Wake whoever sleeps in this process."""
        wake(self._at[word])

    def ring(self, other: int, event: int) -> None:
        """Wake another rank if it waits for such an event. Comes after what it is to see."""
        self._events += 1
        self._mine[EVENTS] = self._events
        self.order()
        words = self._words[other]
        callers = words[CALLERS]
        who = callers >> WHO
        if callers == AWAKE:
            return
        if callers & event and who in (0, self._rank + 1):
            wake(self._at[EVENTS])
            if who == 0:
                self._ring(other, CALLERS, event)
        elif words[THREAD] & ASLEEP and words[THREAD] & event:
            self._ring(other, THREAD, event)

    def _ring(self, other: int, word: int, event: int) -> None:
        words, address = self._words[other], self._theirs[other, word]
        for _ in range(TRIES):
            if wake(address) or not words[word] & event:
                return
