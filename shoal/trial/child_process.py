"""A trial in a forked child: whatever the user's function changes there, this process never sees.

    rank ── fork ──> child: passes of the user's function, the judgement ── verdict ──> pipe
      │ waits, for CHILD_S at most                                                       │
      └──────────────────────────────< reads the verdict <───────────────────────────────┘

Counters, class attributes, generators, buffers, graphs and optimizers stay as they are without any
list of them. A child cannot compute on a CUDA device that its parent uses, so there the trial runs
in this process, and what can be found is put back (`untouched.py`).
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

import torch

from shoal.trial.loss_verdict import LossKind, LossVerdict

Value = TypeVar("Value")

CHILD_S = 30.0
"""Seconds after which a child is given up: a thread of the parent may have held a lock."""


def judged_in_child(judge: Callable[[], LossVerdict]) -> LossVerdict:
    """Return the verdict of `judge`, called in a copy of this process; NOT_JUDGED if that fails."""
    return computed_in_child(judge, partial(LossVerdict, LossKind.NOT_JUDGED, 0.0, ()))


def computed_in_child(compute: Callable[[], Value], failed: Callable[[str], Value]) -> Value:
    """Return what `compute` returns, called in a copy of this process. Not collective.

    Where a child could not compute what this process does, `compute` is called here instead.

    Args: failed: gives the value for the reason why a child has given none, such as its time.
    """
    if not hasattr(os, "fork") or torch.cuda.is_initialized():
        return compute()
    receiving, sending = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        pid = os.fork()
    if pid == 0:
        _compute_and_exit(compute, failed, sending)
    os.close(sending)
    try:
        can_differentiate, value = _received(receiving, failed)
    finally:
        os.close(receiving)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):  # where the script ignores SIGCHLD
            os.waitpid(pid, 0)
    return value if can_differentiate else compute()


def _can_differentiate() -> bool:
    """Return False in a child of a process in which autograd has threads for devices, as builds of
    torch for CUDA start them in the first backward pass, with a GPU or without.
    """
    try:
        torch.ones(1, requires_grad=True).backward()
    except RuntimeError:
        return False
    return True


def _compute_and_exit(
    compute: Callable[[], Value], failed: Callable[[str], Value], sending: int
) -> None:
    """Compute, write the value, and end this child without any cleaning up of its parent's."""
    status = 1
    try:
        # Handlers of the parent would stop a run. The parent ends the child; if that has died, a
        # timer does, which is later so that the parent knows why.
        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(each, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 2 * CHILD_S)
        torch.set_num_threads(1)  # the parent's pool of threads is not here
        can_differentiate = _can_differentiate()
        value: Value | None = None
        try:
            value = compute() if can_differentiate else None
        except Exception as error:  # noqa: BLE001 - of whatever kind, the parent tells it
            text = f"its trial fails with {type(error).__name__}: {error}".split("\n")[0][:200]
            value = failed(text)
        data = memoryview(pickle.dumps((can_differentiate, value)))
        while data:
            data = data[os.write(sending, data) :]
        status = 0
    finally:
        os._exit(status)  # without a value the parent says that there is none


def _received(receiving: int, failed: Callable[[str], Value]) -> tuple[bool, Value]:
    data, ready = b"", [receiving]
    while ready:
        ready, _, _ = select.select([receiving], [], [], CHILD_S)
        part = os.read(receiving, 1 << 16) if ready else b""
        if not part:
            break
        data += part
    try:
        value: tuple[bool, Value] = pickle.loads(data)
    except (EOFError, pickle.UnpicklingError):
        what = "was killed" if ready else f"did not end within {CHILD_S:.0f} s"
        return True, failed(f"its trial in a process of its own {what}")
    return value
