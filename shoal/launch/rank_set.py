"""The ranks of a world, on this host or on several, as `supervise` and the watchdog see them."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from shoal.launch.failure import Failure
from shoal.launch.output import StreamName
from shoal.launch.rank import RankResult
from shoal.watchdog.progress_word import RankProgress

SECONDS_BETWEEN_LOOKS = 1.0


@dataclass(frozen=True)
class RankExited:
    """The end of a rank's process; a negative code is the signal that killed it."""

    rank: int
    code: int


RankEvent = RankExited | Failure | RankResult


class RankSet(ABC):
    """All ranks of one world. As a context, it kills them all.

    Attributes:
        all: the ranks that were started, by rank. Each has a `number`, `is_alive` until it has
            ended, and takes a signal to its own process alone, `signal(number)`.
        hang_limit_s: the limit after which a rank is late; 0 for none.
    """

    all: list[Any]
    hang_limit_s: float

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def alive(self) -> list[Any]:
        """Those that have not ended."""
        return [rank for rank in self.all if rank.is_alive]

    @abstractmethod
    def watch(self, timeout_s: float | None, sources: Sequence[Any] = ()) -> list[RankEvent]:
        """Wait for events, forward what was printed, and return the events.

        Args:
            timeout_s: return after this time at the latest; None waits for ever.
            sources: other objects with a `fileno`; return when one of them can be read.

        Raises:
            LaunchError: the ranks' store has ended before them.
        """

    @abstractmethod
    def pause(self) -> None:
        """Stop the ranks and this process (Ctrl-Z); continue the ranks when it is continued."""

    @abstractmethod
    def kill(self) -> None:
        """Kill all processes, and wait for their end."""

    @abstractmethod
    def look(self) -> dict[int, RankProgress]:
        """Return the progress of the ranks that live and have written.

        Time in which all ranks of a host were stopped, or one was in a debugger, is no silence.
        """

    @abstractmethod
    def stacks(self, rank: int) -> str:
        """Return the stacks of all threads of a rank, with a first line, or why there are none."""

    def host(self, rank: int) -> str:
        """Return the name of the rank's host; empty where there is one host only."""
        return ""


@dataclass(frozen=True)
class HostShare:
    """The ranks that one host has in a world on several, and the way to the others.

    Args:
        first_rank: of this host; its ranks follow each other.
        world: the number of ranks on all hosts.
        address: IP address of the store in which all ranks meet.
        port: of the store.
        listener: bound to address and port on the host that serves the store, None elsewhere. It
            is closed in `start`.
        variables: of all ranks of this host, such as the network interface.
        emit: takes a rank, the name of a stream, and lines that were written to it; None where
            this process has the terminal and all ranks of the world.
    """

    first_rank: int
    world: int
    address: str
    port: int
    listener: socket.socket | None
    variables: Mapping[str, str]
    emit: Callable[[int, StreamName, list[str]], None] | None
