"""The ranks of a world as `supervise` sees them, on this host or on several."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol

from shoal.launch.failure import Failure
from shoal.launch.progress_source import ProgressSource
from shoal.launch.rank import RankResult
from shoal.launch.rank_events import RankExited

RankEvent = RankExited | Failure | RankResult


class RankHandle(Protocol):
    """One rank."""

    @property
    def number(self) -> int:
        """The rank."""

    @property
    def pid(self) -> int:
        """Its process on this host; 0 where it is on another."""

    def signal(self, number: int) -> None:
        """Send a signal to the rank's own process, not to its children."""

    def signal_group(self, number: int) -> None:
        """Send a signal to the rank and to all processes that it started."""


class RankSet(Protocol):
    """All ranks of one world. As a context, it kills them all."""

    @property
    def all(self) -> Sequence[RankHandle]:
        """The ranks that were started, by rank."""

    @property
    def alive(self) -> Sequence[RankHandle]:
        """Those that have not ended."""

    def watch(self, timeout_s: float | None, sources: Sequence[Any] = ()) -> Sequence[RankEvent]:
        """Wait for events, forward what was printed, and return the events.

        Args:
            timeout_s: return after this time at the latest; None waits for ever.
            sources: other objects with a `fileno`; return when one of them can be read.
        """

    def pause(self) -> None:
        """Stop the ranks and this process; continue the ranks when this process is continued."""

    def located(self, failure: Failure) -> Failure:
        """Return the failure with the host of its rank, where there are several hosts."""

    def kill(self) -> None:
        """Kill all processes, and wait for their end."""

    def progress_source(self) -> ProgressSource:
        """Return the ranks' progress, for the watchdog of this start."""

    def __enter__(self) -> RankSet: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
