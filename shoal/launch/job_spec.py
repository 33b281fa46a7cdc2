"""What the ranks of a run do, and how they are started: for the first time, and to go on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.launch.ranks import Ranks
from shoal.launch.start import start


@dataclass(frozen=True)
class JobSpec:
    """A run on ranks of this machine that can be gone on with.

    Args: target: called in every rank; it goes on from what was saved, and saves and ends with 75
        after a SIGTERM. arguments: of the first start. again: of every later one. objections: why
        so many ranks cannot do it; none where they can. saved_step: the step that the next start
        goes on from; None for the beginning. environment, preload: as for `shoal.launch.local.run`.
    """

    target: Callable[..., Any]
    arguments: tuple[Any, ...]
    restart_target: tuple[Any, ...]
    problems: Callable[[int], Sequence[str]]
    saved_step: Callable[[], int | None]
    environment: Mapping[str, str]
    preload: Sequence[str]

    def begin(self, processes: int) -> Ranks:
        """The first start. Raises LaunchError: no such number of processes, or they cannot be
        started.
        """
        return self._start(self.arguments, processes)

    def continue_from(self, processes: int) -> Ranks:
        """A later start. Raises LaunchError."""
        return self._start(self.restart_target, processes)

    def _start(self, arguments: tuple[Any, ...], processes: int) -> Ranks:
        preload = [*self.preload, self.target.__module__]
        return start(self.target, arguments, processes, self.environment, "first", preload=preload)
