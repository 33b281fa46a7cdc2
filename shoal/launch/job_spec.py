"""The work of a run's ranks, with the arguments of the first start and of every later one."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shoal.launch.rank_set import RankSet
from shoal.launch.start import start


class ResumableJob(Protocol):
    """A run that can be resumed, on this host or on several."""

    @property
    def problems(self) -> Callable[[int], Sequence[str]]:
        """Returns why `shoal scale` cannot give the run so many ranks; empty where it can."""

    @property
    def saved_step(self) -> Callable[[], int | None]:
        """Returns the step from which the next start resumes; None for the beginning."""

    @property
    def secret(self) -> bytes | None:
        """The secret of a job on several hosts; None on one."""

    def start(self, processes: int) -> RankSet:
        """Start the ranks for the first time. Raises LaunchError."""

    def available(self, processes: int, signals: socket.socket) -> int:
        """Return how many ranks can be started now in place of `processes`, after a loss.

        Args:
            processes: the number of ranks before.
            signals: as `supervise.caught` yields it. It is not read; once it can be, a wait for
                lost hosts ends.

        Returns:
            The number; 0 where the run cannot go on.
        """

    def restart(self, processes: int) -> RankSet:
        """Start the ranks so that they resume. Raises as `start` does."""


@dataclass(frozen=True)
class JobSpec:
    """A run on ranks of this machine that can be resumed.

    Args:
        target: called in every rank, where it joins the world by Shoal's mesh, not by `env://`.
            After a SIGTERM it must save and end with exit code 75; when it is called again it must
            resume from there.
        arguments: of the first start.
        restart_arguments: of every later start.
        problems: returns why the run cannot have so many ranks; empty where it can.
        saved_step: returns the step from which the next start resumes; None for the beginning.
        environment: as for `shoal.launch.local.run`.
        preload: as for `shoal.launch.local.run`.
    """

    target: Callable[..., Any]
    arguments: tuple[Any, ...]
    restart_arguments: tuple[Any, ...]
    problems: Callable[[int], Sequence[str]]
    saved_step: Callable[[], int | None]
    environment: Mapping[str, str]
    preload: Sequence[str]

    @property
    def secret(self) -> bytes | None:
        """None: ranks of one host find what they share in its files."""
        return None

    def start(self, processes: int) -> RankSet:
        """Start the ranks for the first time.

        Raises:
            LaunchError: `processes` is below 1, or the ranks cannot be started.
        """
        return self._start(self.arguments, processes)

    def available(self, processes: int, signals: socket.socket) -> int:
        """Return `processes`: this machine has not been lost."""
        return processes

    def restart(self, processes: int) -> RankSet:
        """Start the ranks so that they resume. Raises as `start` does."""
        return self._start(self.restart_arguments, processes)

    def _start(self, arguments: tuple[Any, ...], processes: int) -> RankSet:
        preload = [*self.preload, self.target.__module__]
        return start(
            self.target,
            arguments,
            processes,
            self.environment,
            "first",
            preload=preload,
            torch_store=False,
        )
