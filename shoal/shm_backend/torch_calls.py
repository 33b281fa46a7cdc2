"""How torch calls a group, and what else watches the calls: profilers and traces of a run.

group.allreduce ──┬── another form, such as allreduce(tensor) ──> torch brings it to the usual one
                  ├── fake and meta tensors ────────────────────> nothing
                  ├── a profiler ──> a record of c10d::allreduce_ ──> the call
                  └── nobody watches ───────────────────────────────> the call

torch's dispatcher takes no backend that is written in Python (2.13), so that dispatch modes do not
see these calls.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import wraps
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Work
from torch.profiler import record_function

from shoal.errors import UsageError
from shoal.platform.torch_private.c10d import Options
from shoal.platform.torch_private.dispatch_state import is_fake, is_profiling, number_of_modes
from shoal.shm_backend.call_handles import CompletedWork, ForwardedWork
from shoal.trace.recorder import InFlight, Recorder

PROXIES = "torch.fx.experimental.proxy_tensor"
NO_LIMIT = timedelta(0)
OPTIONS = frozenset(
    getattr(Options, f"{name}Options")
    for name in (
        *("Allreduce", "Broadcast", "Allgather", "ReduceScatter", "Barrier"),
        *("AllreduceCoalesced", "Reduce", "Gather", "Scatter", "AllToAll"),
    )
)
Method = TypeVar("Method", bound=Callable[..., Work])


def torch_call(op: str) -> Callable[[Method], Method]:
    """Return a decorator for a method that profilers know as c10d::`op`.

    The method takes tensors, in lists as torch.distributed passes them, and torch's options last.
    Raises UsageError in a trace of make_fx, which would miss the call.
    """

    def decorate(method: Method) -> Method:
        @wraps(method)
        def call(self: Any, *args: Any, **named: Any) -> Work:
            if named or not args or type(args[-1]) not in OPTIONS:
                return _call_by_torch(method.__name__, self, args, named)
            if number_of_modes():
                _refuse_trace(op)
            if _first_is_fake(args):
                return CompletedWork(())
            if not is_profiling():
                return method(self, *args)
            with record_function(f"c10d::{op}"), record_function(f"shoal:{method.__name__}"):
                return method(self, *args)

        return cast("Method", call)

    return decorate


def _call_by_torch(name: str, group: Any, args: Any, named: Mapping[str, Any]) -> Work:
    """Let torch make lists and options of the arguments, and call the group's method with them."""
    work: Work = getattr(dist.ProcessGroup, name)(group, *args, **named)
    return work


def _refuse_trace(op: str) -> None:
    if PROXIES in sys.modules and sys.modules[PROXIES].get_proxy_mode() is not None:
        raise UsageError(
            f"make_fx cannot trace c10d::{op} of backend 'shoal': trace with a group of Gloo, "
            "dist.new_group(backend='gloo')"
        )


def _first_is_fake(args: tuple[Any, ...]) -> bool:
    """Return True if the first tensor has no memory."""
    for value in args:
        while isinstance(value, (list, tuple)) and value:
            value = value[0]
        if isinstance(value, Tensor):
            return value.is_meta or (type(value) is not Tensor and is_fake(value))
    return False


def trace(recorder: Recorder, flight: InFlight, call: Callable[[], Work]) -> Work:
    """Make a call while a trace is taken, and record how long its caller waits for it."""
    start_ns = recorder.now()
    work = call()
    recorder.blocked(flight, start_ns)
    return TracedWork(work, recorder, flight)


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
