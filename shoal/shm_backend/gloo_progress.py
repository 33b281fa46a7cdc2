"""Progress words of calls that Gloo makes alone: between hosts, and where no memory is shared.

Without them the launcher could not tell a rank that waits for others from one that does not come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Work

from shoal.shm_backend.call import CallSignature
from shoal.watchdog.progress_word import COLLECTIVES
from shoal.watchdog.progress_writer import CallProgress, now_ns, own_progress

NO_LIMIT = timedelta(0)
KINDS = {kind.replace("_", ""): kind for kind in COLLECTIVES}


@contextmanager
def waiting_for_hosts() -> Iterator[None]:
    """Say that the calling thread waits for other ranks in this context, and count the time."""
    progress, start_ns = own_progress(), now_ns()
    with progress.waiting():
        yield
    progress.add_waited(now_ns() - start_ns)


class GlooProgress:
    """Counts the calls of one group that Gloo makes, and shows the last one.

    Args:
        label: name of the group, the same on all its ranks.
        ranks: the global ranks of the group.
    """

    def __init__(self, label: str, ranks: Sequence[int]) -> None:
        self._label, self._ranks = label, list(ranks)
        self._progress: CallProgress | None = None
        self._calls = 0

    def begin(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Say that this rank begins a call; `name` is the method of torch's backend."""
        if self._progress is None:  # most groups make no such call
            label = f"{self._label} by Gloo on {self._ranks}"
            self._progress = own_progress().join_group(label, self._ranks)
        self._calls += 1
        kind = KINDS.get(name.replace("_", "").removesuffix("base"), "gloo")
        length = sum(tensor.numel() for tensor in tensors)
        self._progress.begin(self._calls, CallSignature(kind, torch.uint8, length).encoded)


class WatchedWork(Work):
    """A handle of Gloo that shows to the launcher that its caller waits."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Wait until the call is complete. Raises the error of the call."""
        with waiting_for_hosts():
            return bool(self._work.wait(timeout))

    def synchronize(self) -> None:
        self.wait()

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
