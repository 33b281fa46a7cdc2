"""Handles of calls, for callers that wait for a call or ask whether it is complete.

QueuedCall      a call in the queue, which a thread completes
CompletedWork   a call that was complete when it returned
ForwardedWork   a call of Gloo, or, as TracedWork, one that a trace records
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Work

from shoal.errors import CollectiveFailed
from shoal.shm_backend.call import CallSignature
from shoal.shm_backend.phase_board import Steps
from shoal.shm_backend.waiter import Condition
from shoal.trace.recorder import InFlight, Recorder
from shoal.watchdog.progress_writer import own_progress

NO_LIMIT = timedelta(0)
# Gloo returns this class too. Its subclass torch.futures.Future takes longer to construct.
Future: Any = torch.Future


class CallHandle(Work):
    """The parts of a handle that follow from `wait`, `is_completed` and `exception`."""

    _results: Sequence[Tensor]

    def synchronize(self) -> None:
        self.wait()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def result(self) -> list[Tensor]:
        self.wait()
        return list(self._results)


class QueuedCall(CallHandle):
    """A call that was not complete when it returned, and its handle.

    Attributes:
        call, word: the signature, and its encoding.
        start: makes the steps.
        opts: torch's options of the call, with its timeout.
        steps: the generator; None before the call has started.
        pending: the condition and its argument that the caller did not wait for any longer.
        error: the exception with which the call ended.
        done: set when the call has ended.
    """

    def __init__(
        self,
        call: CallSignature,
        word: int,
        start: Callable[[], Steps],
        results: Sequence[Tensor],
        opts: Any,
    ) -> None:
        super().__init__()
        self.call = call
        self.word = word
        self.start = start
        self.opts = opts
        self.steps: Steps | None = None
        self.pending: tuple[Condition, Any] | None = None
        self.error: BaseException | None = None
        self.done = threading.Event()
        self._results = results
        self._futures: list[torch.futures.Future[Any]] = []

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Wait until the call is complete.

        Raises: CollectiveFailed: it is not complete after `timeout`. The error of the call, if it
            failed.
        """
        if not self.done.is_set():
            limit_s = timeout.total_seconds()
            with own_progress().waiting():
                is_done = self.done.wait(limit_s if limit_s > 0 else None)
            if not is_done:
                raise CollectiveFailed(
                    f"{self.call.describe()} was not complete after {limit_s:g} s."
                )
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return self.done.is_set()

    def exception(self) -> BaseException | None:
        return self.error

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that is complete when the call is; its value is the list of results."""
        base: torch.futures.Future[Any] = Future([])

        def outcome(_: torch.futures.Future[Any]) -> Any:
            # Only an exception of a callback is an error for C++ code that waits for the future.
            if self.error is not None:
                raise self.error
            return list(self._results)

        future = base.then(outcome)
        self._futures.append(base)
        # The call may have ended before the future was in the list.
        if self.done.is_set():
            self._resolve_futures()
        return future

    def end(self) -> None:
        """Say that the call has ended, with `error` or without."""
        self.done.set()
        self._resolve_futures()

    def _resolve_futures(self) -> None:
        """Resolve the futures that are in the list.

        Both the end of the call and `get_future` call this function. The later of the two finds the
        future in the list.
        """
        while self._futures:
            with contextlib.suppress(IndexError):  # both may be here at the same time
                self._futures.pop().set_result(None)


class CompletedWork(CallHandle):
    """The handle of a call or message that was complete when it returned."""

    def __init__(self, results: Sequence[Tensor]) -> None:
        super().__init__()
        self._results = results

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = Future([])
        future.set_result(list(self._results))
        return future


class ForwardedWork(CallHandle):
    """A handle that stands for another one. Subclasses have `wait`."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        return bool(self._work.is_success())

    def exception(self) -> Any:
        return self._work.exception()

    def result(self) -> list[Tensor]:
        return list(self._work.result())

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = self._work.get_future()
        return future


class TracedWork(ForwardedWork):
    """A handle that records how long its caller waits for it."""

    def __init__(self, work: Work, recorder: Recorder, flight: InFlight) -> None:
        super().__init__(work)
        self._recorder = recorder
        self._flight = flight

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Wait until the call is complete. Raises the error of the call."""
        start_ns = self._recorder.now()
        done = bool(self._work.wait(timeout))
        self._flight.finish()
        self._recorder.blocked(self._flight, start_ns)
        return done

    def is_completed(self) -> bool:
        done = bool(self._work.is_completed())
        if done:
            self._flight.finish()
        return done


def traced(recorder: Recorder, flight: InFlight, call: Callable[[], Work]) -> Work:
    """Make a call while a trace is taken, and record how long its caller waits for it."""
    start_ns = recorder.now()
    work = call()
    recorder.blocked(flight, start_ns)
    return TracedWork(work, recorder, flight)
