"""How torch calls a group, and how profilers see it.

group.allreduce ──┬── another form, such as allreduce(tensor) ──> torch brings it to the usual one
                  ├── a profiler ──> a record of c10d::allreduce_ ──> the call
                  └── nobody watches ───────────────────────────────> the call

torch's dispatcher takes no backend that is written in Python (2.13), so that dispatch modes do not
see these calls.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed.distributed_c10d import Work
from torch.profiler import record_function

from shoal.errors import UsageError
from shoal.platform.torch_private.c10d import Options
from shoal.platform.torch_private.subclasses import is_profiling, number_of_modes

PROXIES = "torch.fx.experimental.proxy_tensor"
OPTIONS = frozenset(
    getattr(Options, f"{name}Options")
    for name in (
        *("Allreduce", "Broadcast", "Allgather", "ReduceScatter", "Barrier"),
        *("AllreduceCoalesced", "Reduce", "Gather", "Scatter", "AllToAll"),
    )
)
Method = TypeVar("Method", bound=Callable[..., Work])

refusals: list[Exception] = []
"""Raised by every call while there is one: by a dispatch mode whose code other ranks do not run."""

watchers: list[Callable[[Any], None]] = []
"""Given the arguments of every call."""


def torch_call(op: str) -> Callable[[Method], Method]:
    """Return a decorator for a method that profilers know as c10d::`op`.

    The method takes tensors, in lists as torch.distributed passes them, and torch's options last.
    Raises UsageError in a trace of make_fx, which would miss the call.
    """

    def decorate(method: Method) -> Method:
        @wraps(method)
        def call(self: Any, *args: Any, **named: Any) -> Work:
            if named or not args or type(args[-1]) not in OPTIONS:
                # torch makes lists and options of the arguments, and calls this method with them.
                usual_form: Callable[..., Work] = getattr(dist.ProcessGroup, method.__name__)
                return usual_form(self, *args, **named)
            if number_of_modes():
                if PROXIES in sys.modules and sys.modules[PROXIES].get_proxy_mode() is not None:
                    raise UsageError(
                        f"make_fx cannot trace c10d::{op} of backend 'shoal': trace with a group "
                        "of Gloo, dist.new_group(backend='gloo')"
                    )
                if refusals:
                    raise refusals[-1]
            for watch in watchers:
                watch(args)
            if not is_profiling():
                return method(self, *args)
            with record_function(f"c10d::{op}"), record_function(f"shoal:{method.__name__}"):
                return method(self, *args)

        return cast("Method", call)

    return decorate
