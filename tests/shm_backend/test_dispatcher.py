"""Collectives are seen by profilers, and fake tensors reach no other rank."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from shoal.errors import UsageError
from shoal.testing import world

SINGLE = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SCATTER_SINGLE = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def test_the_profiler_sees_what_it_sees_of_gloo() -> None:
    assert world.run(2, _watch) == [True, True]


def _watch() -> bool:
    seen = []
    for group in (dist.group.WORLD, dist.new_group(backend="gloo")):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            results = _call_everything(group)
        profiled = {event.key for event in profile.key_averages() if "c10d::" in event.key}
        seen.append((profiled, results))
    ours, gloos = seen
    assert ours[0] >= gloos[0], gloos[0] - ours[0]
    assert ours[1] == gloos[1]
    return True


def _call_everything(group: Any) -> list[list[float]]:
    rank, rows = dist.get_rank(), [torch.zeros(4), torch.zeros(4)]
    tensors = [torch.arange(4.0) + 10 * rank + 100 * index for index in range(9)]
    dist.all_reduce(tensors[0], group=group)
    dist.broadcast(tensors[1], src=1, group=group)
    dist.all_gather(rows, tensors[2], group=group)
    dist.scatter(tensors[3], rows if rank == 0 else None, src=0, group=group)
    dist.reduce_scatter(tensors[4], rows, group=group)
    dist.all_to_all_single(tensors[5], tensors[6] + 1, group=group)
    SINGLE(whole := torch.zeros(8), tensors[6], group=group)
    SCATTER_SINGLE(tensors[7], whole, group=group)
    dist.gather(tensors[8], rows if rank == 0 else None, dst=0, group=group)
    dist.barrier(group=group)
    work = dist.all_reduce(tensors[8], group=group, async_op=True)
    assert work is not None
    work.wait()
    return [tensor.tolist() for tensor in (*tensors, *rows, whole)]


def test_a_trace_that_would_miss_a_collective_is_refused() -> None:
    assert world.run(2, _trace) == [[2.0, 2.0]] * 2


def _trace() -> list[float]:
    def program(tensor: Tensor) -> Tensor:
        doubled = tensor * 2
        dist.all_reduce(doubled)
        return doubled

    with pytest.raises(UsageError, match="make_fx cannot trace c10d::allreduce_"):
        make_fx(program)(torch.ones(2))
    dist.all_reduce(after := torch.ones(2))
    found: list[float] = after.tolist()
    return found


def test_tensors_without_numbers_are_refused_and_leave_the_group_as_it_is() -> None:
    assert world.run(2, _fake) == [[2.0], [2.0]]


def _fake() -> list[float]:
    if dist.get_rank() == 0:  # the other rank never hears of it
        with FakeTensorMode():
            inside = torch.ones(3)
            with pytest.raises(UsageError, match="a fake tensor has no numbers"):
                dist.all_reduce(inside)
        with pytest.raises(UsageError, match="a fake tensor has no numbers"):
            dist.all_gather([torch.zeros(3), torch.zeros(3)], inside)
        with pytest.raises(UsageError, match="takes CPU tensors alone, not one on meta"):
            dist.all_reduce(torch.ones(3, device="meta"))
    dist.all_reduce(real := torch.ones(1))
    total: list[float] = real.tolist()
    return total
