"""Several hosts on one machine: SHOAL_HOST is the host of a rank."""

import os
import random

import backend_parity_calls
import pytest
import torch
import torch.distributed as dist

from shoal.errors import CollectiveFailed
from shoal.shm_backend.group import ShoalGroup
from shoal.testing import world

ONE_HOST = {"strided"}  # Gloo takes no tensor with gaps


def _group_over(hosts: str) -> dist.ProcessGroup:
    os.environ["SHOAL_HOST"] = hosts[dist.get_rank()]
    group = dist.new_group()
    del os.environ["SHOAL_HOST"]
    return group


@pytest.mark.parametrize("hosts", ["AABB", "ABAB", "AABBCC"])
def test_an_all_reduce_adds_on_each_host_and_then_over_hosts(hosts: str) -> None:
    calls = world.run(len(hosts), _sums, hosts)
    assert min(calls) > 0  # it went through shared memory


def _sums(hosts: str) -> int:
    group, size, rank = _group_over(hosts), len(hosts), dist.get_rank()
    assert isinstance(group, ShoalGroup)
    assert group.sums_in_order
    for length in (1, 5, 1000, 200_001):
        made = [
            torch.randn(length, generator=torch.Generator().manual_seed(r)) for r in range(size)
        ]
        totals = []
        for host in dict.fromkeys(hosts):
            first, *others = [one for one, where in zip(made, hosts, strict=True) if where == host]
            totals.append(sum(others, first))
        total = sum(totals[1:], totals[0])
        for op, expected in ((dist.ReduceOp.SUM, total), (dist.ReduceOp.AVG, total / size)):
            tensor = made[rank].clone()
            work = dist.all_reduce(tensor, op, group=group, async_op=length > 5)
            if work is not None:
                work.wait()
            assert torch.equal(tensor, expected), (length, op)
        dist.all_reduce(highest := made[rank].clone(), dist.ReduceOp.MAX, group=group)
        assert torch.equal(highest, torch.stack(made).amax(0))
    dist.broadcast(highest, src=1, group=group)  # Gloo's
    dist.barrier(group=group)
    return group._board.calls


def test_hosts_that_differ_in_their_calls_get_an_error() -> None:
    assert world.run(4, _differ) == [True] * 4


def _differ() -> bool:
    group = _group_over("AABB")
    with pytest.raises(CollectiveFailed, match="float32, sum"):
        dist.all_reduce(torch.ones(10 if dist.get_rank() < 2 else 9), group=group)
    return True


def test_all_other_calls_over_hosts_are_gloos() -> None:
    assert world.run(4, _other_calls) == [0] * 4


def _other_calls() -> int:
    group = _group_over("AABB")
    assert isinstance(group, ShoalGroup)
    for kind in sorted(
        backend_parity_calls.CALLS.keys()
        - {"all_reduce", "all_reduce_complex", "all_reduce_coalesced"}
        - ONE_HOST
    ):
        for seed in range(3):
            backend_parity_calls.CALLS[kind](group, [0, 1, 2, 3], random.Random(seed))
    return group._board.calls


@pytest.mark.parametrize("hosts", ["AAB", "ABC"])
def test_where_hosts_differ_in_ranks_or_have_one_each_gloo_does_all(hosts: str) -> None:
    assert world.run(3, _gloo_sums, hosts) == [(False, 6.0)] * 3


def _gloo_sums(hosts: str) -> tuple[bool, float]:
    group = _group_over(hosts)
    assert isinstance(group, ShoalGroup)
    tensor = torch.full((3,), dist.get_rank() + 1.0)
    dist.all_reduce(tensor, group=group)
    return group.sums_in_order, tensor[0].item()


@pytest.mark.parametrize("hosts", ["AABB", "AAB", "ABA"])
def test_messages_find_their_way_inside_and_between_hosts(hosts: str) -> None:
    assert world.run(len(hosts), _messages, hosts) == [True] * len(hosts)


def _messages(hosts: str) -> bool:
    group, rank = _group_over(hosts), dist.get_rank()
    assert isinstance(group, ShoalGroup)
    others = [other for other in range(len(hosts)) if other != rank]
    into = {other: torch.zeros(3) for other in others}
    works = [dist.isend(torch.full((3,), float(rank)), other, group) for other in others]
    works += [dist.irecv(tensor, other, group) for other, tensor in into.items()]
    for work in works:
        assert work is not None
        work.wait()
    assert all((tensor == other).all() for other, tensor in into.items())
    if rank == 0:
        sources = {dist.recv(torch.zeros(3), group=group) for _ in others}
        assert sources == set(others)
    else:
        dist.send(torch.ones(3), 0, group)
    dist.barrier()
    return True
