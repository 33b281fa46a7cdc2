"""The queue of a group's calls: they run in the order in which they were made, each with a handle.

      caller    all_reduce ─ all ranks are there: done at once ───────────> handle, complete
      caller    all_reduce ─ not yet ─┐                                     handle
      thread                          └─ sleeps, goes on, completes ───────────^

A synchronous call is driven by its caller. An asynchronous call is started by its caller too: its
values are written to the slots, and often all other ranks have already come. Only a call that is
not complete after INLINE_WAIT_S is left to the thread, because waking a thread takes longer than a
small all-reduce."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.distributed_c10d import Work

from shoal.errors import CollectiveFailed, PeerLost
from shoal.shm_backend.call import CallSignature
from shoal.shm_backend.call_handles import CompletedWork, QueuedCall
from shoal.shm_backend.phase_board import Steps
from shoal.shm_backend.waiter import Waiter

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
