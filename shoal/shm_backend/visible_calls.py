"""Calls of a group that something watches go through torch's dispatcher first.

all_reduce ──┬── nobody watches ───────────────────────────────> shared memory
             ├── a profiler ──> a record of c10d::allreduce_ ──> shared memory
             └── a mode, a fake tensor ──> c10d::allreduce_ ───> shared memory, or nothing
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from torch import Tensor
from torch.distributed.distributed_c10d import Work
from torch.profiler import record_function

from shoal.platform.torch_private import c10d_ops
from shoal.platform.torch_private.c10d_ops import is_profiling, number_of_modes

# Methods that torch knows by another name.
NAMES = {
    "_all_to_all_single": "alltoall_base",
    "_allreduce": "allreduce",
    "_broadcast": "broadcast",
}
Method = TypeVar("Method", bound=Callable[..., Work])


def visible(op: str, splits: slice | None = None) -> Callable[[Method], Method]:
    """Return a decorator for a method whose calls torch's dispatcher knows as c10d::`op`.

    The method takes its tensors first and its options last.

    Args: splits: the arguments between, which the operator has after its tensors.
    """

    def decorate(method: Method) -> Method:
        name = NAMES.get(method.__name__, method.__name__)

        @wraps(method)
        def call(self: Any, *args: Any) -> Work:
            if not number_of_modes() and not is_profiling() and not _first_has_own_dispatch(args):
                return method(self, *args)
            return call_visibly(method, self, name, op, args, splits)

        return cast("Method", call)

    return decorate


def call_visibly(
    method: Callable[..., Work],
    group: Any,
    name: str,
    op: str,
    args: tuple[Any, ...],
    splits: slice | None = None,
) -> Work:
    """Make a call so that modes and profilers see it. Arguments as of `visible`."""
    if c10d_ops.is_running():
        return method(group, *args)
    if not number_of_modes() and not _first_has_own_dispatch(args):
        events = record_function(f"c10d::{op}"), record_function(f"shoal:{name}")
        with events[0], events[1], c10d_ops.running(method):
            return method(group, *args)
    between = () if splits is None else args[splits]

    def run(*tensors: Any) -> Work:
        return method(group, *(tensors if name != "barrier" else ()), *between, args[-1])

    work: Work = c10d_ops.run_below(group, name, op, args, run)
    return work


def _first_has_own_dispatch(args: tuple[Any, ...]) -> bool:
    """Return True if the first tensor is fake, meta or of another class with its own operators."""
    for value in args:
        while isinstance(value, (list, tuple)) and value:
            value = value[0]
        if type(value) is Tensor:
            return value.is_meta
        if isinstance(value, Tensor):
            return c10d_ops.has_own_dispatch(value)
    return False
