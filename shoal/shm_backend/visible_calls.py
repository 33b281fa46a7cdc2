"""Calls of a group while something watches torch's operators.

all_reduce ──┬── nobody watches ───────────────────────────────> shared memory
             ├── a profiler ──> a record of c10d::allreduce_ ──> shared memory
             └── fake and meta tensors ────────────────────────> nothing

torch's dispatcher takes no backend that is written in Python (2.13), so that dispatch modes do not
see these calls.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from torch import Tensor
from torch.distributed.distributed_c10d import Work
from torch.profiler import record_function

from shoal.errors import UsageError
from shoal.platform.torch_private.dispatch_state import is_fake, is_profiling, number_of_modes
from shoal.shm_backend.call_handles import CompletedWork

PROXIES = "torch.fx.experimental.proxy_tensor"
Method = TypeVar("Method", bound=Callable[..., Work])


def visible(op: str) -> Callable[[Method], Method]:
    """Return a decorator for a method that profilers know as c10d::`op`.

    The method takes its tensors first. Raises UsageError in a trace of make_fx, which would miss
    the call.
    """

    def decorate(method: Method) -> Method:
        @wraps(method)
        def call(self: Any, *args: Any) -> Work:
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
