"""What torch makes of the names "shoal" and "cpu:shoal", with other backends and without."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from shoal.errors import CollectiveFailed, UsageError
from shoal.shm_backend.group import ShoalGroup
from shoal.testing import world
from shoal.trace.recorder import Recorder


def test_a_tensor_of_another_device_is_refused_also_if_the_group_names_a_backend_for_it() -> None:
    assert world.run(2, _mix_backends) == [[2.0, 2.0]] * 2


def _mix_backends() -> list[float]:
    group = dist.new_group(backend="cpu:shoal,cuda:gloo")
    for call in (
        dist.all_reduce,
        lambda tensor, group: dist.send(tensor, 1 - dist.get_rank(), group),
    ):
        with pytest.raises(UsageError, match=r"CPU tensors alone.* 'cpu:gloo,cuda:nccl'"):
            call(torch.ones(2, device="meta"), group=group)
    dist.all_reduce(tensor := torch.ones(2), group=group)
    values: list[float] = tensor.tolist()
    return values


def test_a_group_over_several_hosts_is_gloos_and_names_the_ranks_of_its_host() -> None:
    assert world.run(3, _over_hosts) == ["", "", ""]


def _over_hosts() -> str:
    os.environ["SHOAL_HOST"] = "ABA"[dist.get_rank()]
    group = dist.new_group(timeout=timedelta(seconds=1))
    del os.environ["SHOAL_HOST"]
    assert isinstance(group, ShoalGroup)
    assert not group.uses_shared_memory
    dist.all_reduce(tensor := torch.full((3,), dist.get_rank() + 1.0), group=group)
    assert tensor.tolist() == [6.0] * 3
    if dist.get_rank() == 0:
        with pytest.raises(
            CollectiveFailed, match=r"rank 1, rank 2 \(process \d+\), which is alive"
        ):
            dist.all_reduce(tensor, group=group)
    dist.barrier()
    return ""


def test_a_reduce_scatter_over_hosts_sends_each_rank_its_row_and_adds_in_order() -> None:
    calls = {"alltoall_base (Gloo)"}
    assert world.run(3, _reduce_scatter) == [([0.0, 5.0 * n], [1.0] * 4, calls) for n in range(3)]


def _reduce_scatter() -> tuple[list[float], list[float], set[str]]:
    rank = dist.get_rank()
    os.environ["SHOAL_HOST"] = "ABC"[rank]
    group = dist.new_group()
    del os.environ["SHOAL_HOST"]
    # 1e16 + 1 is 1e16: the sum is 0 in the order of ranks, and in no other.
    own = torch.tensor([[1e16, 1.0, -1e16][rank], [0.0, 2.0, 3.0][rank]], dtype=torch.float64)
    terms = torch.stack([own * torch.tensor([1.0, row]) for row in range(3)])
    group.recorder = recorder = Recorder()
    recorder.begin()
    dist.reduce_scatter_tensor(sums := torch.empty_like(own), terms, group=group)
    calls = {span.name for span in recorder.end()}
    group.recorder = None
    transposed, ones = torch.empty(2, 2).half().t(), torch.ones(6, 2).half()
    dist.reduce_scatter_tensor(transposed, ones, dist.ReduceOp.AVG, group)
    return sums.tolist(), transposed.flatten().tolist(), calls


def test_a_monitored_barrier_names_the_ranks_that_did_not_come() -> None:
    assert world.run(3, _wait_for_all) == ["2", "", ""]


def _wait_for_all() -> str:
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    group, said = dist.new_group(timeout=timedelta(seconds=30)), ""
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"Ranks? 2") as caught:
            dist.monitored_barrier(group, timeout=timedelta(seconds=1), wait_all_ranks=True)
        said = "2" if "2 failed" in str(caught.value) else str(caught.value)
    elif dist.get_rank() == 1:
        with pytest.raises(RuntimeError, match=r"monitoredBarrier|rank 0"):
            dist.monitored_barrier(group, timeout=timedelta(seconds=1))
    dist.barrier()
    return said


def test_a_destroyed_group_keeps_no_more_descriptors_than_one_of_gloo() -> None:
    assert world.run(2, _count_descriptors) == [True, True]


def _count_descriptors() -> bool:
    kept = {}
    for backend in ("cpu:shoal", "gloo"):
        _use_a_group(backend)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(4):
            _use_a_group(backend)
        kept[backend] = len(os.listdir("/proc/self/fd")) - before
    assert kept["cpu:shoal"] <= kept["gloo"], kept
    return True


def _use_a_group(backend: str) -> None:
    group = dist.new_group(backend=backend)
    dist.all_reduce(torch.ones(3), group=group)
    dist.all_gather([torch.ones(5), torch.ones(5)], torch.ones(5), group=group)
    work = dist.all_reduce(torch.ones(3, dtype=torch.int32), group=group, async_op=True)
    assert work is not None
    work.wait()
    dist.barrier()
    dist.destroy_process_group(group)


def test_a_group_that_was_destroyed_refuses_calls_and_a_pending_one_takes_no_5_seconds() -> None:
    first, second = world.run(2, _leave)
    assert "left its group" in first
    assert "destroyed" in second


def _leave() -> str:
    group = dist.new_group()
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        assert work is not None
    begin = time.monotonic()
    dist.destroy_process_group(group)
    assert time.monotonic() - begin < 4.0
    with pytest.raises(CollectiveFailed) as caught:
        group.allreduce([torch.ones(3)]).wait()
    dist.barrier()
    return str(caught.value)
