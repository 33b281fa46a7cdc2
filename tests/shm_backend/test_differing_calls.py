"""Ranks whose calls differ in a root, or in who makes them."""

from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

from shoal.errors import CollectiveFailed
from shoal.testing import world


@pytest.mark.parametrize("ranks", [2, 3])
def test_roots_that_differ_are_an_error_on_all_ranks_at_once(ranks: int) -> None:
    assert world.run(ranks, _differ_in_roots) == [True] * ranks


def _differ_in_roots() -> bool:
    """Broadcast from root 1 on the last rank and from root 0 on the others."""
    root = 1 if dist.get_rank() == dist.get_world_size() - 1 else 0
    group = dist.new_group(timeout=timedelta(seconds=20))
    with pytest.raises(CollectiveFailed, match=r" calls broadcast\("):
        dist.broadcast(torch.ones(5), src=root, group=group)
    dist.barrier()
    return True


@pytest.mark.parametrize("kind", ["gather", "all_reduce"])
def test_a_rank_whose_call_gloo_makes_is_named_after_the_time_out(kind: str) -> None:
    waiting, _ = world.run(2, _differ_in_transport, kind)
    assert "waited 1 s in all_reduce(4 x float32, sum)" in waiting
    assert "rank 1 (process " in waiting


def _differ_in_transport(kind: str) -> str:
    """Reduce numbers on rank 0, and on rank 1 what only Gloo takes, or gather."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    rows = [torch.zeros(4), torch.zeros(4)]
    calls = {
        "gather": partial(dist.gather, torch.ones(4), rows, dst=1, group=group),
        "all_reduce": partial(dist.all_reduce, torch.eye(3).to_sparse(), group=group),
    }
    call = calls[kind] if dist.get_rank() else partial(dist.all_reduce, rows[0], group=group)
    with pytest.raises(CollectiveFailed) as caught:
        call()
    dist.barrier()
    return str(caught.value)
