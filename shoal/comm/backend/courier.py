"""Who moves messages on: whoever waits for one, and else a thread.

      caller    isend ── all in the ring at once ──────────────────────────> wait(): has it been taken?
      caller    irecv ── not yet there ── computes ─────────────── wait()
      thread                       └── woken when it comes, copies it ──^

While a caller waits it moves everybody's messages, and the thread is left asleep. The thread is made when something is
first not done at once; it is woken for what it could move, and for nothing else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed.distributed_c10d import Work

from shoal.comm.backend.bell import ASLEEP, AWAKE, CALLERS, ROOM, SLICES, THREAD, WHO, Bell
from shoal.comm.backend.peers import Peers
from shoal.comm.backend.pending import NO_LIMIT, Pending, Receiving, Sending
from shoal.comm.backend.post import Post
from shoal.comm.backend.waiting import Spins
from shoal.errors import CollectiveFailed, PeerLost

NAP_S = 20e-3  # after which a caller looks whether everybody is alive
SHORT_NAP_S = 2e-3  # after which who can miss a ring looks for itself
IDLE_S = 60.0
GRACE_S = 5.0  # for the others to take what was sent, when this rank leaves


class Courier:
    """Drives one rank's messages. Any thread may call.

    Args:
        spin_s: how long a caller looks before it sleeps, at most.
        timeout_s: how long one waits while nothing of a message moves.
        ranks: what the ranks of the host are in the group.
    """

    def __init__(
        self, post: Post, bell: Bell, peers: Peers, timeout_s: float, spin_s: float, ranks: Sequence[int]
    ) -> None:
        self.post, self._bell, self._peers, self.ranks = post, bell, peers, ranks
        self._timeout_s, self._spins = timeout_s, Spins(spin_s)
        self._turn = threading.Lock()  # whoever moves messages, or tells others about it, holds it
        self._callers = 0
        self._sleepers: list[int | None] = []  # whom each waits for
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def take(self, pending: Sending | Receiving) -> Work:
        """A message is to be sent, or received."""
        with self._turn:
            if self._is_closed:
                raise CollectiveFailed(f"this rank has left its group before {pending.describe(self.post.names)}.")
            self.post.add(pending)
            if pending.is_settled():  # as most sends are, and what came before it was asked for
                return Delivery(self, pending)
            self._move()
            if self._thread is None and self.post.wants():
                self._thread = threading.Thread(
                    target=self._live, name=f"shoal messages {self.post.names}", daemon=True
                )
                self._thread.start()
        return Delivery(self, pending)

    def is_settled(self, pending: Pending) -> bool:
        """Whether it is over by now. Waits for nothing."""
        if not pending.is_settled() and self._turn.acquire(blocking=False):
            try:
                self._move()
            finally:
                self._turn.release()
        return pending.is_settled()

    def wait(self, pending: Pending, limit_s: float = 0.0) -> None:
        """Until it is over. Args: limit_s: 0 for the group's own.

        Raises: CollectiveFailed, PeerLost: it will never be, or was not in time.
        """
        if not self.is_settled(pending):
            with self._turn:
                self._attend(1)
            try:
                self._spin(pending)
                self._sleep(pending, limit_s)
            finally:
                with self._turn:
                    self._attend(-1)
                    if self.post.wants():
                        self._move()  # from here on the thread is woken, but not for what came before
        if pending.error is not None:
            raise pending.error

    def close(self) -> None:
        """Give the others a while to take what was sent; no message passes any more."""
        end = time.monotonic() + GRACE_S
        while (sent := self._under_way()) and time.monotonic() < end:
            lines = {self.post.lines[sending.other].channel.other for sending in sent if sending.other is not None}
            if lines <= set(self._peers.dead()):
                break
            time.sleep(1e-3)
        with self._turn:
            self._is_closed = True
            for line in self.post.lines.values():
                if line.error is None:
                    self.post.fail(line, CollectiveFailed("this rank left its group before the message was complete."))
                line.channel.close()
            for receiving in self.post.posted:
                receiving.error = CollectiveFailed("this rank left its group before a message came.")
            self.post.posted.clear()
        thread = self._thread
        while thread is not None and thread is not threading.current_thread() and thread.is_alive():
            self._bell.wake_own(THREAD)
            thread.join(1e-3)

    def _under_way(self) -> list[Sending]:
        with self._turn:
            self._move()
            return [sending for line in self.post.lines.values() for sending in (*line.leaving, *line.unread)]

    def _move(self) -> None:
        """Move what can be, having said what one is to be woken for, so that nothing falls in between."""
        asleep = self._bell.said(THREAD) & ASLEEP
        self._bell.say(THREAD, asleep | SLICES | ROOM)
        self.post.move()
        self._bell.say(THREAD, asleep | self.post.wants())

    def _attend(self, more: int) -> None:
        self._callers += more
        self._say_callers()

    def _say_callers(self) -> None:
        state = AWAKE if self._callers else 0
        if self._sleepers:
            whom = self._sleepers[0] if len(self._sleepers) == 1 else None
            state |= self.post.awaits() | (0 if whom is None else whom + 1 << WHO)
        self._bell.say(CALLERS, state)

    def _spin(self, pending: Pending) -> None:
        """Look for it, and for each further piece of it, for as long as this has paid."""
        at, begin = pending.at, time.perf_counter()
        while not self.is_settled(pending):
            now = time.perf_counter()
            if pending.at != at:
                at, begin = pending.at, now
            elif now - begin > self._spins.limit_s:
                self._spins.were_in_vain()
                return
        self._spins.paid()

    def _sleep(self, pending: Pending, limit_s: float) -> None:
        end, at = time.monotonic() + (limit_s or self._timeout_s), pending.at
        while True:
            other, begun = pending.other, time.monotonic()
            with self._turn:
                events = 0 if other is None else self._bell.events(other)
                self._sleepers.append(other)
                self._say_callers()
                self._move()
                state = self._bell.said(CALLERS)
            try:
                if not pending.is_settled():
                    if other is None:
                        self._bell.sleep(CALLERS, state, SHORT_NAP_S)
                    else:
                        self._bell.sleep_on(other, events, NAP_S)
            finally:  # Ctrl-C too
                with self._turn:
                    self._sleepers.remove(other)
                    self._say_callers()
            with self._turn:
                self._move()
                now = time.monotonic()
                has_moved, at = pending.at != at, pending.at
                if has_moved and not limit_s:
                    end = now + self._timeout_s
                is_due = now > end or now - begun >= (NAP_S if other is not None else SHORT_NAP_S) / 2
                if is_due and not pending.is_settled():
                    self._check(pending, now > end, limit_s or self._timeout_s)
            if has_moved:
                self._spin(pending)  # more of it is on its way
            if pending.is_settled():
                return

    def _check(self, pending: Pending, is_late: bool, limit_s: float) -> None:
        """Look after those that are waited for."""
        post, peers = self.post, self._peers
        dead = peers.dead()
        post.move()  # what came before its sender died has come
        if pending.is_settled():
            return
        other = pending.other if pending.other is not None else getattr(pending, "source", None)
        described, here = pending.describe(post.names), post.names[post.rank]
        if other is None:
            for line in list(post.lines.values()):
                post.check(line)
            lost = [line.error for line in post.lines.values() if line.error is not None]
            if len(dead) == len(peers.pids) or len(lost) == len(peers.pids):
                cause = "all other ranks have ended" if len(lost) < len(peers.pids) else f"{lost[0]}"
                self._give_up(pending, PeerLost(f"rank {here} waits in {described}, but {cause}."))
            elif is_late:
                self._give_up(pending, CollectiveFailed(f"rank {here} waited {limit_s:g} s in {described}."))
            return
        post.check(post.line(other))
        if pending.is_settled():
            return
        name, process = post.names[other], peers.pids[other]
        if other in dead:
            text = f"rank {name} (process {process}) has ended while rank {here} waited for it in {described}."
            self._give_up(pending, PeerLost(text))
        elif is_late:
            text = (
                f"rank {here} waited {limit_s:g} s in {described} for rank {name} (process {process}), which "
                f"{peers.state(other)}. Every send needs its recv, with the same tag; a rank that computes for longer "
                "needs a longer timeout= in init_process_group."
            )
            self._give_up(pending, CollectiveFailed(text))

    def _give_up(self, pending: Pending, error: CollectiveFailed) -> None:
        pending.error = error
        other = pending.other if pending.other is not None else getattr(pending, "source", None)
        if other is not None:
            self.post.fail(self.post.line(other), error)
        self.post.posted = [receiving for receiving in self.post.posted if receiving is not pending]

    def _live(self) -> None:
        while True:
            with self._turn:
                if self._is_closed:
                    return
                self._bell.say(THREAD, ASLEEP)
                self._move()
                state = self._bell.said(THREAD)
            busy = state != ASLEEP and not self._callers
            self._bell.sleep(THREAD, state, SHORT_NAP_S if busy else NAP_S if state != ASLEEP else IDLE_S)
            with self._turn:
                self._bell.say(THREAD, self._bell.said(THREAD) & ~ASLEEP)


class Delivery(Work):
    """What torch knows a message by."""

    def __init__(self, courier: Courier, pending: Pending) -> None:
        super().__init__()
        self._courier, self._pending = courier, pending

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Until it has arrived. Raises what went wrong."""
        self._courier.wait(self._pending, max(timeout.total_seconds(), 0.0))
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._courier.is_settled(self._pending)

    def is_success(self) -> bool:
        return self.is_completed() and self._pending.error is None

    def exception(self) -> Any:
        return self._pending.error

    def result(self) -> list[Tensor]:
        self.wait()
        return [self._pending.tensor]

    def source_rank(self) -> int:
        """Whose message it was, as a rank of the group."""
        return self._source_rank()

    def _source_rank(self) -> int:
        source = getattr(self._pending, "source", None)
        return -1 if source is None else self._courier.ranks[source]
