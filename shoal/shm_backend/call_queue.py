"""The queue of a group's calls: they run in the order in which they were made, each with a handle.

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
from shoal.platform.torch_private import typed_futures
from shoal.shm_backend.call import CallSignature
from shoal.shm_backend.phase_board import Steps
from shoal.shm_backend.waiter import Condition, Waiter
from shoal.watchdog.progress_writer import own_progress

INLINE_WAIT_S = 1e-3
GRACE_S = 0.5
NO_LIMIT = timedelta(0)
# Gloo returns this class too. Its subclass torch.futures.Future takes longer to construct.
Future: Any = torch.Future


class QueuedCall:
    """A call that is not complete.

    Attributes:
        call, word: the signature, and its encoding.
        start: makes the steps.
        results: the value of the call's future.
        opts: torch's options of the call, with its timeout.
        steps: the generator; None before the call has started.
        pending: the condition and its argument that the caller did not wait for any longer.
        error: the exception with which the call ended.
        done: set when the call has ended.
        futures: torch futures to resolve at the end.
    """

    def __init__(
        self,
        call: CallSignature,
        word: int,
        start: Callable[[], Steps],
        results: Sequence[Tensor],
        opts: Any,
    ) -> None:
        self.call = call
        self.word = word
        self.start = start
        self.results = results
        self.opts = opts
        self.steps: Steps | None = None
        self.pending: tuple[Condition, Any] | None = None
        self.error: BaseException | None = None
        self.done = threading.Event()
        self.futures: list[torch.futures.Future[Any]] = []


class ShmWork(Work):
    """The handle of a queued call."""

    def __init__(self, job: QueuedCall) -> None:
        super().__init__()
        self._job = job

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Wait until the call is complete.

        Raises: CollectiveFailed: it is not complete after `timeout`. The error of the call, if it
            failed.
        """
        job = self._job
        if not job.done.is_set():
            limit_s = timeout.total_seconds()
            with own_progress().waiting():
                is_done = job.done.wait(limit_s if limit_s > 0 else None)
            if not is_done:
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
        """Return a future that is complete when the call is; its value is the list of results."""
        job = self._job
        base: torch.futures.Future[Any] = Future([])

        def outcome(_: torch.futures.Future[Any]) -> Any:
            # Only an exception of a callback is an error for C++ code that waits for the future.
            if job.error is not None:
                raise job.error
            return job.results[0] if is_typed else list(job.results)

        is_typed = typed_futures.needs_type(job.results)
        future = base.then(outcome)
        if is_typed:
            future = typed_futures.completed_after(future, job.results)
        job.futures.append(base)
        # The call may have ended before the future was in the list.
        if job.done.is_set():
            _resolve_futures(job)
        return future


class CompletedWork(ShmWork):
    """The handle of a call or message that was complete when it returned."""

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
        if typed_futures.needs_type(self._results):
            return typed_futures.completed(self._results)
        future: torch.futures.Future[Any] = Future([])
        future.set_result(list(self._results))
        return future


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
        self._turn = threading.Lock()  # held by the thread that drives the board
        self._changed = threading.Condition()
        self._jobs: deque[QueuedCall] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.error: BaseException | None = None
        self._completed = CompletedWork(())  # shared by all synchronous calls

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
        is_sync = not opts.asyncOp
        if self._jobs or not self._turn.acquire(False):
            return self._enqueue(QueuedCall(call, word, start, results, opts), is_sync)
        job: QueuedCall | None = None
        try:
            self._board.begin(call, word)
            steps = start()
            if is_sync:
                for condition, phase in steps:
                    if not condition(phase):
                        self._waiter.until(condition, phase, opts)
                return self._completed
            for condition, phase in steps:
                if not condition(phase) and not self._waiter.poll_for(
                    condition, phase, INLINE_WAIT_S
                ):
                    job = QueuedCall(call, word, start, results, opts)
                    job.steps = steps
                    job.pending = (condition, phase)
                    break
            else:
                return CompletedWork(results)
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

        Args: has_turn: the caller has started the call and holds `_turn`, which the thread takes.
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
        handle = ShmWork(job)
        if is_sync:
            handle.wait()
        return handle

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
        job.done.set()
        _resolve_futures(job)

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


def _resolve_futures(job: QueuedCall) -> None:
    """Resolve the futures of a call that has ended.

    Both the end of the call and `get_future` call this function. The later of the two finds the
    future in the list.
    """
    while job.futures:
        with contextlib.suppress(IndexError):  # both may be here at the same time
            job.futures.pop().set_result(None)
