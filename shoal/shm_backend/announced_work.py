"""The handle of a call that Gloo makes and that the phase board shows to the other ranks.

wait() ──> the phase board: do all ranks make it? ──> Gloo: is it complete?
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import Work

NO_LIMIT = timedelta(0)


class AnnouncedWork(Work):
    """A handle of Gloo that fails at once if another rank makes another call.

    Args: shown: the handle of the comparison with the other ranks.
    """

    def __init__(self, work: Work, shown: Work) -> None:
        super().__init__()
        self._work, self._shown = work, shown

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Wait until the call is complete. Raises CollectiveFailed: ranks make other calls."""
        self._shown.wait(timeout)
        return bool(self._work.wait(timeout))

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        return bool(self._work.is_success())

    def exception(self) -> Any:
        return self._shown.exception() or self._work.exception()

    def result(self) -> list[torch.Tensor]:
        return list(self._work.result())

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = self._work.get_future()
        return future
