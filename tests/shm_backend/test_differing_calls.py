"""Ranks whose calls differ in a root, or that reduce a tensor twice in one call."""

from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.errors import CollectiveFailed
from shoal.testing import world

ROOTED = ("broadcast", "reduce", "gather", "scatter")


@pytest.mark.parametrize("ranks", [2, 3])
def test_roots_that_differ_are_an_error_on_all_ranks_at_once(ranks: int) -> None:
    assert world.run(ranks, _differ_in_roots) == [len(ROOTED) + 1] * ranks


def _differ_in_roots() -> int:
    """Call each kind with root 1 on the last rank and root 0 on the others."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    plans = [(kind, kind, 1 if rank == last else 0) for kind in ROOTED]
    plans.append(("broadcast" if rank == 0 else "reduce", "broadcast against reduce", 0))
    failed = 0
    for kind, _, root in plans:
        group = dist.new_group(timeout=timedelta(seconds=20))
        tensor = torch.full((5,), rank + 1.0)
        rows = [torch.zeros(5) for _ in range(last + 1)] if rank == root else None
        call = {
            "broadcast": partial(dist.broadcast, tensor, src=root, group=group),
            "reduce": partial(dist.reduce, tensor, dst=root, group=group),
            "gather": partial(dist.gather, tensor, rows, dst=root, group=group),
            "scatter": partial(dist.scatter, tensor, rows, src=root, group=group),
        }[kind]
        with pytest.raises(CollectiveFailed, match=r" calls (broadcast|reduce|gather|scatter)\("):
            call()
        failed += 1
        dist.barrier()
    return failed


def test_tensors_that_overlap_in_one_call_are_reduced_once() -> None:
    ours, gloos = world.run(2, _reduce_overlapping)
    assert ours == gloos


def _reduce_overlapping() -> list[list[float]]:
    """Return the results on backend shoal on rank 0, and on Gloo on rank 1."""
    results = []
    for group in (dist.group.WORLD, dist.new_group(backend="gloo")):
        assert group is not None
        whole, other = torch.arange(6.0) + dist.get_rank(), torch.arange(6) + dist.get_rank()
        group.allreduce_coalesced([whole, whole]).wait()
        group.allreduce_coalesced([other[:4], other[2:], other[1:2]]).wait()
        results.append([*whole.tolist(), *other.tolist()])
    return results[dist.get_rank()]


def test_a_call_that_gloo_makes_on_one_rank_alone_is_an_error_at_once() -> None:
    assert world.run(2, _differ_in_transport) == [6, 6]


def _differ_in_transport() -> int:
    """Send a dtype or an operation on rank 1 that is not the other's, or that only Gloo knows."""
    sparse = torch.eye(3).to_sparse()
    plans: list[tuple[torch.Tensor, Any]] = [
        (torch.ones(3, dtype=dtype), dist.ReduceOp.SUM)
        for dtype in (torch.float8_e4m3fn, torch.uint16, torch.complex64)
    ]
    plans.append((sparse, dist.ReduceOp.SUM))
    failed = 0
    for (tensor, op), asynchronous in ((plan, a) for plan in plans for a in (False, True)):
        group = dist.new_group(timeout=timedelta(seconds=20))
        given = tensor.clone() if dist.get_rank() else torch.ones(4)
        if asynchronous and tensor is not sparse and tensor.dtype is not torch.uint16:
            continue
        with pytest.raises(CollectiveFailed, match=r" calls (all_reduce\(|a collective of)"):
            _reduce(given, op, group, asynchronous)
        failed += 1
        dist.barrier()
    return failed


def _reduce(tensor: torch.Tensor, op: Any, group: Any, asynchronous: bool) -> None:
    work = dist.all_reduce(tensor, op, group=group, async_op=asynchronous)
    if work is not None:
        work.wait()
