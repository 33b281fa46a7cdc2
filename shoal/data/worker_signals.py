"""SIGTERM in worker processes of loaders: a stop of the whole group lets the rank save first.

Slurm, for one, sends SIGTERM to every process of a step. Workers that it ended would end their
rank in torch's error, in the middle of the save.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

GRACE_S = 30
"""Seconds after a SIGTERM in which a worker goes on: Slurm's KillWait."""


@dataclass(frozen=True)
class OutliveSigterm:
    """A `worker_init_fn`, after which a SIGTERM ends the worker later, and by status 0.

    Args: user_fn: the user's own `worker_init_fn`, which may change that.
    """

    user_fn: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGTERM, lambda *_: signal.alarm(GRACE_S))
        signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
        if self.user_fn is not None:
            self.user_fn(worker)
