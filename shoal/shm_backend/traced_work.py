"""Calls of a group while a trace is taken: their start, their end, and the time spent waiting.

_run, _fall_back_to_gloo ── call ──┬── the caller waits in the call            blocked
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


def trace_steps(
    recorder: Recorder,
    flight: InFlight,
    start: Callable[[], Steps],
    call: Callable[[Callable[[], Steps]], Work],
) -> Work:
    """Make a call on shared memory, and record its end after the last step, in any thread.

    Args:
        start: makes the steps of the call.
        call: makes the call, given a function that makes its steps.
    """
    start_ns = recorder.now()
    work = call(lambda: _finish_after(flight, start()))
    recorder.blocked(flight, start_ns)
    return TracedWork(work, recorder, flight)


def trace_work(
    recorder: Recorder, flight: InFlight, call: Callable[[], Work], has_future: bool
) -> Work:
    """Make a call on another backend.

    Args: has_future: the handle has a future, which records the end of the call. Messages have
        none: their end is recorded after the first `wait`.
    """
    start_ns = recorder.now()
    work = call()
    recorder.blocked(flight, start_ns)
    if has_future:
        work.get_future().add_done_callback(lambda _: flight.finish())
    return TracedWork(work, recorder, flight)


class TracedWork(Work):
    """A handle that records how long its caller waits for it."""

    def __init__(self, work: Work, recorder: Recorder, flight: InFlight) -> None:
        super().__init__()
        self._work = work
        self._recorder = recorder
        self._flight = flight

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Wait until the call is complete. Raises the error of the call."""
        start_ns = self._recorder.now()
        done = bool(self._work.wait(timeout))
        self._flight.finish()
        self._recorder.blocked(self._flight, start_ns)
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


def _finish_after(flight: InFlight, steps: Steps) -> Steps:
    """Take the steps, then record the end of the call."""
    yield from steps
    flight.finish()
