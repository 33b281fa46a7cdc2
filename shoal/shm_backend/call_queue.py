"""The queue of a group's calls: they run in the order in which they were made, each with a handle,
for callers that wait for the call or ask whether it is complete.

      caller    all_reduce ─ all ranks are there: done at once ───────────> handle, complete
      caller    all_reduce ─ not yet ─┐                                     handle
      thread                          └─ sleeps, goes on, completes ───────────^

A synchronous call is driven by its caller. An asynchronous call is started by its caller too: its
values are written to the slots, and often all other ranks have already come. Only a call that is
not complete after INLINE_WAIT_S is left to the thread, because waking a thread takes longer than a
small all-reduce."""

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
from shoal.shm_backend.phase_board import CallSignature, Steps
from shoal.shm_backend.waiter import Condition, Waiter
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


INLINE_WAIT_S = 1e-3
GRACE_S = 0.5


class CallQueue:
    """Runs the calls of one group in sequence. Any thread may call.

    Args:
        waiter: waits for the other ranks.
        name: of the group, for the name of the thread.

    Attributes:
        error: the exception of the first call that failed. No later call works.
    """

    def __init__(self, waiter: Waiter, name: str) -> None:
        self._waiter = waiter
        self._name = name
        self._board = waiter.board
        self._turn = threading.Lock()
        self._changed = threading.Condition()
        self._jobs: deque[QueuedCall] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.error: BaseException | None = None
        self._completed = CompletedWork(())

    def call(
        self,
        call: CallSignature,
        word: int,
        start: Callable[[], Steps],
        results: Sequence[Tensor],
        opts: Any,
    ) -> Work:
        """Make a call, after all calls that were made before it.

        Args:
            word: the encoding of `call`, which the caller caches.
            start: makes the steps.
            opts: torch's options of the call. Unless they have `asyncOp`, the call is complete when
                this method returns. Their `timeout` is read only if the call has to sleep.

        Raises: CollectiveFailed: this call failed, or one before it.
        """
        if self.error is not None:
            raise self._repeat_error()
        if self._jobs or not self._turn.acquire(False):
            return self._enqueue(QueuedCall(call, word, start, results, opts), not opts.asyncOp)
        job: QueuedCall | None = None
        try:
            self._board.begin(call, word)
            is_sync = not opts.asyncOp
            steps = start()
            for condition, phase in steps:
                if condition(phase):
                    continue
                if is_sync:
                    self._waiter.until(condition, phase, opts)
                elif not self._waiter.poll_for(condition, phase, INLINE_WAIT_S):
                    job = QueuedCall(call, word, start, results, opts)
                    job.steps = steps
                    job.pending = (condition, phase)
                    break
            else:
                return self._completed if is_sync else CompletedWork(results)
        except BaseException as error:
            self._give_up(error)
            raise
        finally:
            if job is None:
                self._turn.release()
        return self._enqueue(job, is_sync, has_turn=True)

    def close(self) -> bool:
        """Refuse new calls, and finish those that were made if other ranks come within GRACE_S.

        Returns: False if the thread still runs, because it is the caller.
        """
        self._waiter.set_deadline(GRACE_S)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            if self._thread is threading.current_thread():
                return False
            self._thread.join()
        if self.error is None:
            self.error = CollectiveFailed("the group was destroyed.")
        return True

    def _enqueue(self, job: QueuedCall, is_sync: bool, has_turn: bool = False) -> Work:
        """Leave a call to the thread.

        Args: has_turn: the caller has started the call and holds `turn`, which the thread takes.
        """
        with self._changed:
            if has_turn:
                # First append, then release: no other caller may drive the board in between.
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
        if self._thread is threading.current_thread():
            # A callback of a future calls: it holds up the thread that would make this call.
            while not job.done.is_set():
                self._run_first()
        if is_sync:
            job.wait()
        return job

    def _run(self) -> None:
        """Drive the queued calls until the queue is closed. The thread's loop."""
        while True:
            with self._changed:
                while not self._jobs and not self._closed:
                    self._changed.wait()
                if not self._jobs:
                    return
            self._run_first()

    def _run_first(self) -> None:
        """Drive the first queued call to its end. In the thread alone."""
        with self._turn:
            job = self._jobs[0]
            try:
                self._finish(job)
            except BaseException as error:  # noqa: BLE001 - the thread must outlive its calls
                job.error = job.error or error
            # Not before: `call` looks at the queue, and a new call must come after this one.
            self._jobs.popleft()
        job.end()

    def _finish(self, job: QueuedCall) -> None:
        """Drive one call to its end, and store its error."""
        try:
            if self.error is not None:
                raise self._repeat_error()
            if job.steps is None:
                self._board.begin(job.call, job.word)
                job.steps = job.start()
            elif job.pending is not None:
                self._waiter.until_without_spinning(*job.pending, job.opts)
            for condition, phase in job.steps:
                if not condition(phase):
                    self._waiter.until_without_spinning(condition, phase, job.opts)
        except BaseException as error:  # noqa: BLE001 - `wait` of the handle raises it
            job.error = error
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        """Store the first error, and publish it to the other ranks."""
        if self.error is None:
            self.error = error
            self._board.fail(str(error) or repr(error))

    def _repeat_error(self) -> CollectiveFailed:
        if self._closed:
            return CollectiveFailed(f"this group cannot be used any more: {self.error}")
        kind = PeerLost if isinstance(self.error, PeerLost) else CollectiveFailed
        return kind(f"this group cannot be used any more, since a call has failed: {self.error}")
