"""The operators of torch's dispatcher for collectives, as `c10d::allreduce_`.

      mode, profiler, tensor subclass          c10d::allreduce_ ──> kernel for CPU ──> Gloo, in C++
                                                                      │
                                               while `run_below` runs └──> a method in Python

A process group in Python is called before the dispatcher, so nothing that watches the dispatcher
would see its calls."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Why: these two take 0.1 us and have no public names. Without: a mode or a profiler would see no
# collective of backend "shoal". Checked: 2.11, 2.13, 2.15.
number_of_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
is_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled

_lock = threading.RLock()
_PLAIN_DISPATCH = Tensor.__torch_dispatch__


class _Current(threading.local):
    """The call of this thread that goes through the dispatcher."""

    group: Any = None
    run: Callable[..., Any] | None = None
    work: Any = None


_current = _Current()


def is_running() -> bool:
    """Return True below the dispatcher, in the method that `run_below` calls."""
    return _current.run is not None


@contextlib.contextmanager
def running(run: Callable[..., Any]) -> Iterator[None]:
    """Mark that `run` makes the present call of this thread, which has been seen."""
    _current.run = run
    try:
        yield
    finally:
        _current.run = None


def has_own_dispatch(tensor: Tensor) -> bool:
    """Return True for a tensor whose operators are not those of the CPU: fake, meta, DTensor."""
    return tensor.is_meta or type(tensor).__torch_dispatch__ is not _PLAIN_DISPATCH


def run_below(
    group: dist.ProcessGroup, method: str, op: str, args: tuple[Any, ...], run: Callable[..., Any]
) -> Any:
    """Call torch's own method of a group, whose kernel for CPU tensors is `run` for this thread.

    Args:
        method: the name in dist.ProcessGroup, and `args` its arguments.
        op: the operator in namespace c10d.
        run: takes the tensors of the operator, and returns a Work.

    Why: torch lets no backend be written in Python below the dispatcher (2.13). Without: profilers,
    CommDebugMode and make_fx would miss collectives, and fake tensors would reach shared memory.
    Checked: 2.11, 2.13, 2.15.
    """
    kernel = partial(_kernel, op)
    with _lock:
        library = torch.library.Library("c10d", "IMPL")
        _original(op)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of the kernel that is replaced
            library.impl(op, kernel, "CPU", allow_override=True)
        _current.group, _current.run, _current.work = group, run, None
        try:
            if op == "alltoall_base_":  # both of its methods call the override again
                output, tensor, out_sizes, sizes, opts = args
                boxed = torch.ops.c10d.alltoall_base_(
                    output, tensor, group.boxed(), out_sizes, sizes, opts.asyncOp, -1
                )
                work = dist.Work.unbox(boxed)
            else:
                work = _base_method(method)(group, *args)
            # torch's side of a Work in Python must not outlive it.
            return _current.work or work
        finally:
            _current.group = _current.run = _current.work = None
            library._destroy()


def _kernel(op: str, *args: Any) -> Any:
    """Run the current call of this thread; the kernel of torch for any other group."""
    at = next(i for i, value in enumerate(args) if isinstance(value, torch.ScriptObject))
    if _current.run is None or dist.ProcessGroup.unbox(args[at]) is not _current.group:
        return _original(op).call_boxed(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args)
    work = _current.work = _current.run(*args[:at])
    returns = len(getattr(torch.ops.c10d, op).default._schema.returns)
    return work.boxed() if returns == 1 else (args[0], work.boxed())


@cache
def _original(op: str) -> Any:
    return torch.library.get_kernel(f"c10d::{op}", "CPU")


@cache
def _base_method(name: str) -> Callable[..., Any]:
    """Return a function with this name that calls torch's method.

    pybind11 calls the override in Python again unless the caller has the name of the method.
    """
    names_before_2_13 = {
        "all_gather_single": "_allgather_base",
        "reduce_scatter_single": "_reduce_scatter_base",
    }
    if not hasattr(dist.ProcessGroup, name):
        name = names_before_2_13[name]
    scope: dict[str, Any] = {"Base": dist.ProcessGroup}
    exec(f"def {name}(self, *args):\n    return Base.{name}(self, *args)\n", scope)
    method: Callable[..., Any] = scope[name]
    return method
