"""Connections that are to be one and come one by one: each has shaken hands by itself, in a thread of its own.

thread of the 1st ── join ── waits ──────────────────────> None
thread of the 2nd ────── join ── waits ──────────────────> None       or all are closed, where one does not come
thread of the 3rd ──────────────── join ─────────────────> all three
"""

from __future__ import annotations

import threading

from shoal.errors import WireError
from shoal.server.channel import Channel
from shoal.server.handshake import Strand


class Gathering:
    """Waits until all connections of a talk are there. Args: limit_s: how long."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._news = threading.Condition()
        self._come: dict[tuple[int, bytes, int], dict[int, Channel]] = {}

    def join(self, channel: Channel, number: int, strand: Strand) -> list[Channel] | None:
        """All of them in order, for the last to come; None for the others.

        Args: number: of who has connected.

        Raises: WireError: the others have not come in time, or this one has come before; those that came are closed.
        """
        talk = number, strand.talk, strand.total
        with self._news:
            come = self._come.setdefault(talk, {})
            if strand.number in come:
                channel.close()
                raise WireError(f"connection {strand.number} of {strand.total} came twice. It was refused")
            come[strand.number] = channel
            if len(come) == strand.total:
                del self._come[talk]
                self._news.notify_all()
                return [come[index] for index in range(strand.total)]
            if self._news.wait_for(lambda: self._come.get(talk) is not come, self._limit_s):
                return None
            del self._come[talk]
            self._news.notify_all()
        for channel in come.values():
            channel.close()
        raise WireError(f"{len(come)} of {strand.total} connections came in {self._limit_s:g} s. They were closed")
