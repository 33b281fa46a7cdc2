"""Handles of calls, for callers that wait for a call or ask whether it is complete.

ShmWork         a call in the queue, which a thread completes
CompletedWork   a call that was complete when it returned
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
from shoal.platform.torch_private import typed_futures
from shoal.shm_backend.call import CallSignature
from shoal.shm_backend.phase_board import Steps
from shoal.shm_backend.waiter import Condition
from shoal.watchdog.progress_writer import own_progress

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
            resolve_futures(job)
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


def resolve_futures(job: QueuedCall) -> None:
    """Resolve the futures of a call that has ended.

    Both the end of the call and `get_future` call this function. The later of the two finds the
    future in the list.
    """
    while job.futures:
        with contextlib.suppress(IndexError):  # both may be here at the same time
            job.futures.pop().set_result(None)
