"""Calls in the order in which they were made, and a handle for each.

      caller    all_reduce ─ all others are there: done at once ──────────> handle, complete
      caller    all_reduce ─ not yet ─┐                                     handle
      thread                          └─ waits asleep, goes on, completes ─────^

A call that must be complete when it returns is driven by its caller. One that need not be is begun
by its caller too: its numbers are shown, and often the others have come already. Only what is not
done after a moment goes to the thread."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Work

from shoal.errors import CollectiveFailed, PeerLost
from shoal.shm_backend.call import CallSignature
from shoal.shm_backend.phase_board import Steps
from shoal.shm_backend.waiter import Condition, Waiter

INLINE_WAIT_S = 1e-3
GRACE_S = 5.0
NO_LIMIT = timedelta(0)
Future: Any = (
    torch.Future
)  # which Gloo gives too; the class above it, torch.futures', takes longer to make


class QueuedCall:
    """A call on its way."""

    def __init__(
        self, call: CallSignature, word: int, start: Callable[[], Steps], results: Sequence[Tensor]
    ) -> None:
        self.call, self.word, self.start, self.results = call, word, start, results
        self.steps: Steps | None = None
        self.pending: tuple[Condition, Any] | None = None
        self.error: BaseException | None = None
        self.done = threading.Event()
        self.futures: list[torch.futures.Future[Any]] = []


class ShmWork(Work):
    """What torch knows a call by."""

    def __init__(self, job: QueuedCall) -> None:
        super().__init__()
        self._job = job

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Until it is complete. Raises what went wrong."""
        job = self._job
        if not job.done.is_set():
            limit_s = timeout.total_seconds()
            if not job.done.wait(limit_s if limit_s > 0 else None):
                raise CollectiveFailed(
                    f"{job.call.describe()} was not complete after {limit_s:g} s."
                )
        if job.error is not None:
            raise job.error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._job.done.is_set()

    def is_success(self) -> bool:
        return self._job.done.is_set() and self._job.error is None

    def exception(self) -> BaseException | None:
        return self._job.error

    def result(self) -> list[Tensor]:
        self.wait()
        return list(self._job.results)

    def get_future(self) -> torch.futures.Future[Any]:
        """Complete when the call is; its value is the list of result tensors."""
        job = self._job
        base: torch.futures.Future[Any] = Future([])

        def outcome(_: torch.futures.Future[Any]) -> list[Tensor]:
            if job.error is not None:
                raise job.error  # only what a callback raises is an error for waiting C++ too
            return list(job.results)

        future = base.then(outcome)
        job.futures.append(base)
        if job.done.is_set():
            _resolve_futures(job)
        return future


class CompletedWork(ShmWork):
    """A call or a message that was complete when it returned."""

    def __init__(self, results: Sequence[Tensor]) -> None:
        Work.__init__(self)
        self._results = results

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[Tensor]:
        return list(self._results)

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = Future([])
        future.set_result(list(self._results))
        return future


class CallQueue:
    """Drives the calls of one group, one after the other. Any thread may call."""

    def __init__(self, waiting: Waiter, name: str) -> None:
        self._waiting, self._name = waiting, name
        self._board = waiter.board
        self._turn = threading.Lock()  # held by the thread that drives the board holds it
        self._changed = threading.Condition()
        self._jobs: deque[QueuedCall] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.error: BaseException | None = None
        self._done = CompletedWork(())

    def call(
        self,
        call: CallSignature,
        word: int,
        start: Callable[[], Steps],
        results: Sequence[Tensor],
        at_once: bool,
    ) -> Work:
        """Make a call, after all that were made before it.

        Args:
            word: the call's, which is worth keeping.
            start: makes its steps.
            at_once: it must be complete when this returns.

        Raises: CollectiveFailed: this call went wrong, or one before it.
        """
        if self.error is not None:
            raise self._repeat_error()
        if self._jobs or not self._turn.acquire(blocking=False):
            return self._queue(QueuedCall(call, word, start, results), at_once, first=False)
        job: QueuedCall | None = None
        try:
            self._board.begin(call, word)
            steps = start()
            if at_once:
                for condition, phase in steps:
                    if not condition(phase):
                        self._waiting.until(condition, phase)
                return self._done
            for condition, phase in steps:
                if not condition(phase) and not self._waiting.poll_for(
                    condition, phase, INLINE_WAIT_S
                ):
                    job = QueuedCall(call, word, start, results)
                    job.steps, job.pending = steps, (condition, phase)
                    break
            else:
                return CompletedWork(results)
        except BaseException as error:
            self._give_up(error)
            raise
        finally:
            if job is None:
                self._turn.release()
        return self._queue(job, at_once, first=True)

    def close(self) -> None:
        """Finish what was begun, if the others come soon; no call is taken any more."""
        self._waiting.set_deadline(GRACE_S)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _queue(self, job: QueuedCall, at_once: bool, first: bool) -> Work:
        with self._changed:
            if first:  # it is under way, and the thread takes it over
                self._jobs.appendleft(job)
                self._turn.release()
            else:
                self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name=f"shoal {self._name}", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()
        handle = ShmWork(job)
        if at_once:
            handle.wait()
        return handle

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._closed:
                    self._changed.wait()
                if not self._jobs:
                    return
            with self._turn:
                job = self._jobs[0]
                self._finish(job)
                self._jobs.popleft()  # not before: who calls now must come after it
            job.done.set()
            _resolve_futures(job)
            del job  # and with it its tensors, however long it takes until the next

    def _finish(self, job: QueuedCall) -> None:
        try:
            if self.error is not None:
                raise self._repeat_error()
            if job.steps is None:
                self._board.begin(job.call, job.word)
                job.steps = job.start()
            elif job.pending is not None:
                self._waiting.until_without_spinning(*job.pending)
            for condition, phase in job.steps:
                if not condition(phase):
                    self._waiting.until_without_spinning(condition, phase)
        except BaseException as error:  # noqa: BLE001 - whoever waits for the job raises it
            job.error = error
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
            self._board.fail(str(error) or repr(error))

    def _repeat_error(self) -> CollectiveFailed:
        kind = PeerLost if isinstance(self.error, PeerLost) else CollectiveFailed
        return kind(f"this group cannot be used any more, since a call has failed: {self.error}")


def _resolve_futures(job: QueuedCall) -> None:
    """Tell those that hold a future. Whoever comes second, the job's end or the future, finds
    the other.
    """
    while job.futures:
        with contextlib.suppress(IndexError):  # two threads may be here
            job.futures.pop().set_result(None)
