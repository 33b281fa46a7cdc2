"""Checks of private names about collectives below torch's dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import distribute_tensor, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.platform.torch_private import c10d_ops
from shoal.platform.torch_private.c10d import Options, add_backend, backend_for
from shoal.testing import world

T = TypeVar("T")
CPU = torch.device("cpu")


class _Watch(TorchDispatchMode):
    """Keeps the names of the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


class _Group(dist.ProcessGroup):
    """A group in Python, which counts the calls that come to it. Gloo is its second backend."""

    def __init__(self) -> None:
        super().__init__(dist.get_rank(), dist.get_world_size())
        self.calls = 0
        self.plain = dist.new_group(backend="gloo")
        self.gloo = backend_for(self.plain, CPU)
        add_backend(self, CPU, dist.ProcessGroup.BackendType.GLOO, self.gloo)

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        self.calls += 1
        return self.gloo.allreduce(tensors, opts)


def _in_thread(function: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def _reduce_below(group: _Group, tensor: Tensor, run: Callable[..., Any]) -> Any:
    args = [tensor], Options.AllreduceOptions()
    return c10d_ops.run_below(group, "allreduce", "allreduce_", args, run)


def _during_call(look: Callable[[_Group], T]) -> T:
    """What `look` finds in the kernel of a collective that makes its way through the dispatcher."""
    group, found = _Group(), []

    def run(tensors: list[Tensor]) -> Any:
        found.append(look(group))
        return group.gloo.allreduce(tensors)

    _reduce_below(group, tensor := torch.ones(1), run).wait()
    assert tensor.item() == 2.0
    return found[0]


def _counts_modes(number_of_modes: Callable[[], int]) -> bool:
    found = [number_of_modes()]
    with _Watch():
        found.append(number_of_modes())
        with _Watch():
            found.append(number_of_modes())
    return [*found, number_of_modes()] == [0, 1, 2, 0]


def _knows_profilers(is_profiling: Callable[[], bool]) -> bool:
    found = [is_profiling()]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        found.append(is_profiling())
    found.append(is_profiling())
    with torch.autograd.profiler.profile():
        found.append(is_profiling())
    return [*found, is_profiling()] == [False, True, False, True, False]


def _locks_other_threads_out() -> bool:
    """The thread of a call may make another in it, and no other thread may until its end."""

    def takes_it() -> bool:
        taken = c10d_ops._lock.acquire(blocking=False)
        if taken:
            c10d_ops._lock.release()
        return taken

    mine, others = _during_call(lambda _: (takes_it(), _in_thread(takes_it)))
    return mine and not others and _in_thread(takes_it)


def _is_of_plain_tensors(plain: Any) -> bool:
    class Named(Tensor):
        pass

    class Own(Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            return func(*args, **(kwargs or {}))

    kinds = (Tensor, nn.Parameter, Named, Own)
    return [kind.__torch_dispatch__ is plain for kind in kinds] == [True, True, True, False]


def _tells_own_dispatch() -> bool:
    has_own_dispatch = c10d_ops.has_own_dispatch
    with FakeTensorMode():
        fake = torch.ones(2)
    sharded = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)))
    own = all(map(has_own_dispatch, (fake, sharded, torch.ones(2, device="meta"))))
    return own and not any(map(has_own_dispatch, (torch.ones(2), nn.Parameter(torch.ones(2)))))


def _knows_its_thread() -> bool:
    before = c10d_ops.is_running()
    inside = _during_call(lambda _: (c10d_ops.is_running(), _in_thread(c10d_ops.is_running)))
    return (before, *inside, c10d_ops.is_running()) == (False, True, False, False)


def _is_of_one_thread() -> bool:
    current = c10d_ops._current

    def values() -> tuple[Any, ...]:
        return current.group, current.run, current.work

    def look(group: _Group) -> bool:
        mine = current.group is group and callable(current.run) and current.work is None
        return mine and _in_thread(values) == (None, None, None)

    return _during_call(look) and values() == (None, None, None)


def _marks_until_an_error(running: Any) -> bool:
    found = []
    try:
        with running(print):
            found.append(c10d_ops.is_running())
            raise KeyError
    except KeyError:
        found.append(c10d_ops.is_running())
    return found == [True, False]


def _is_seen_and_runs_below() -> bool:
    group, given = _Group(), []

    def run(tensors: list[Tensor]) -> Any:
        given.append(group.gloo.allreduce(tensors))
        return given[-1]

    tensor = torch.ones(1)
    with _Watch() as mode:
        work = _reduce_below(group, tensor, run)
    work.wait()
    seen = mode.names == ["c10d::allreduce_"] and work is given[0] and group.calls == 0
    with FakeTensorMode():
        _reduce_below(group, torch.ones(1), run)
    dist.all_reduce(tensor, group=group.plain)  # torch's own kernel is there again
    return seen and len(given) == 1 and tensor.item() == 4.0 and _exchanges_below(group)


def _exchanges_below(group: _Group) -> bool:
    """True if `run_below` takes alltoall_base_, too, which it calls in another way."""

    def run(output: Tensor, tensor: Tensor) -> Any:
        return group.gloo.alltoall_base(output, tensor, [], [], opts)

    opts, output = Options.AllToAllOptions(), torch.zeros(2)
    args = output, torch.tensor([0.0, 1.0]) + 10 * dist.get_rank(), [], [], opts
    with _Watch() as mode:
        work = c10d_ops.run_below(group, "alltoall_base", "alltoall_base_", args, run)
    work.wait()
    expected = [float(dist.get_rank()), 10.0 + dist.get_rank()]
    return mode.names == ["c10d::alltoall_base_"] and output.tolist() == expected


def _leaves_other_groups_alone() -> bool:
    """Collectives of Gloo, of this thread and another, while a call of ours is under way."""

    def look(group: _Group) -> list[float]:
        mine, others = torch.ones(1), torch.ones(1)
        dist.all_reduce(mine, group=group.plain)
        _in_thread(lambda: dist.all_reduce(others, group=group.plain))
        return [mine.item(), others.item()]

    return _during_call(look) == [2.0, 2.0]


def _is_kernel_of_torch() -> bool:
    kernel, group = c10d_ops._original("alltoall_base_"), dist.new_group(backend="gloo")
    output, tensor = torch.zeros(2), torch.tensor([0.0, 1.0]) + 10 * dist.get_rank()
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    with _Watch() as mode:
        boxed = kernel.call_boxed(keys, output, tensor, group.boxed(), [], [], True, -1)
    dist.Work.unbox(boxed).wait()
    expected = [float(dist.get_rank()), 10.0 + dist.get_rank()]
    return "c10d::alltoall_base_" not in mode.names and output.tolist() == expected


def _passes_the_override_by() -> bool:
    group, tensor, opts = _Group(), torch.ones(1), Options.AllreduceOptions()
    method = c10d_ops._base_method("allreduce")
    method(group, [tensor], opts).wait()
    before = group.calls
    dist.ProcessGroup.allreduce(group, [tensor], opts).wait()  # this caller has another name
    named = method.__name__ == "allreduce"
    return named and (before, group.calls) == (0, 1) and tensor.item() == 4.0


def _over(ranks: int, function: Callable[[], bool]) -> Callable[[Any], bool]:
    return lambda _: all(world.run(ranks, function))


CHECKS: dict[str, Callable[[Any], bool]] = {
    "c10d_ops.number_of_modes": _counts_modes,
    "c10d_ops.is_profiling": _knows_profilers,
    "c10d_ops._lock": _over(2, _locks_other_threads_out),
    "c10d_ops._PLAIN_DISPATCH": _is_of_plain_tensors,
    "c10d_ops._current": _over(2, _is_of_one_thread),
    "c10d_ops.is_running": _over(2, _knows_its_thread),
    "c10d_ops.running": _marks_until_an_error,
    "c10d_ops.has_own_dispatch": _over(1, _tells_own_dispatch),
    "c10d_ops.run_below": _over(2, _is_seen_and_runs_below),
    "c10d_ops._kernel": _over(2, _leaves_other_groups_alone),
    "c10d_ops._original": _over(2, _is_kernel_of_torch),
    "c10d_ops._base_method": _over(2, _passes_the_override_by),
}
