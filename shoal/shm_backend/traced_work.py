"""Calls of a group while a trace is taken: when this rank came, when the call was complete, and who
waited for it.

_run, _leave ── call ──┬── the caller waits in the call            blocked
                       └── a handle ── wait(), where it is used    blocked
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import Work

from shoal.platform.torch_private.c10d import source_rank
from shoal.shm_backend.phase_board import Steps
from shoal.trace.recorder import InFlight, Recorder

NO_LIMIT = timedelta(0)


def watch_steps(
    recorder: Recorder,
    flight: InFlight,
    start: Callable[[], Steps],
    call: Callable[[Callable[[], Steps]], Work],
) -> Work:
    """Make a call on shared memory; it is complete when its last step is done, in whatever
    thread.
    """
    begun_ns = recorder.now()
    work = call(lambda: _landing(flight, start()))
    recorder.blocked(flight, begun_ns)
    return TracedWork(work, recorder, flight)


def watch_work(recorder: Recorder, flight: InFlight, call: Callable[[], Work], tells: bool) -> Work:
    """Make a call on another backend.

    Args: tells: it has a future. Where it has none, as messages from rank to rank, it ends for us
        when somebody has waited for it.
    """
    begun_ns = recorder.now()
    work = call()
    recorder.blocked(flight, begun_ns)
    if tells:
        work.get_future().add_done_callback(lambda _: flight.finish())
    return TracedWork(work, recorder, flight)


class TracedWork(Work):
    """A handle that notes who waits for it, and for how long."""

    def __init__(self, work: Work, recorder: Recorder, flight: InFlight) -> None:
        super().__init__()
        self._work, self._recorder, self._flight = work, recorder, flight

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Until it is complete. Raises what went wrong."""
        begun_ns = self._recorder.now()
        done = bool(self._work.wait(timeout))
        self._flight.finish()
        self._recorder.blocked(self._flight, begun_ns)
        return done

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        done = bool(self._work.is_completed())
        if done:
            self._flight.finish()
        return done

    def is_success(self) -> bool:
        return bool(self._work.is_success())

    def exception(self) -> Any:
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        return list(self._work.result())

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = self._work.get_future()
        return future

    def source_rank(self) -> int:
        return int(self._work.source_rank())

    def _source_rank(self) -> int:
        return source_rank(self._work)


def _landing(flight: InFlight, steps: Steps) -> Steps:
    yield from steps
    flight.finish()
