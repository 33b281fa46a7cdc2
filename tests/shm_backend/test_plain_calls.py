"""Calls that are one C function: their values, and everything that must still go through Python."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from in_process_ranks import meet
from torch import nn

from shoal.errors import CollectiveFailed
from shoal.platform.torch_private.c10d import Options
from shoal.shm_backend import native
from shoal.shm_backend.call_queue import CallQueue
from shoal.shm_backend.group import ShoalGroup
from shoal.shm_backend.liveness import PeerLiveness
from shoal.shm_backend.native import NativeCalls
from shoal.shm_backend.plain_calls import plain_calls
from shoal.shm_backend.waiter import Waiter
from shoal.testing import world
from shoal.watchdog.progress_writer import own_progress

pytestmark = pytest.mark.skipif(
    not native.version(), reason="there was no compiler when Shoal was installed"
)


def test_plain_calls_and_all_others_come_to_the_same_values() -> None:
    world.run(2, _check_values)


def _check_values() -> None:
    rank = dist.get_rank()
    group = dist.new_group()
    assert isinstance(group, ShoalGroup)
    taken = _count_plain_calls(group)
    _check_plain(group, rank)
    assert taken == ["all_reduce"] * 13 + ["broadcast"] * 4
    taken.clear()
    _check_not_plain(group, rank)
    assert taken == []
    assert group._board.calls_of(1 - rank) == group._board.calls == 17 + 7


def _check_plain(group: ShoalGroup, rank: int) -> None:
    for dtype in (torch.float32, torch.float64):
        for length in (0, 1, 1000, 300_000, 600_001):
            values = torch.arange(length, dtype=dtype) + rank
            dist.all_reduce(values, group=group)
            assert torch.equal(values, 2 * torch.arange(length, dtype=dtype) + 1)
    values = torch.full((2, 3), float(rank))
    dist.all_reduce(values, dist.ReduceOp.AVG, group=group)
    assert torch.equal(values, torch.full((2, 3), 0.5))
    work = dist.all_reduce(values, group=group, async_op=True)
    work.wait()
    assert torch.equal(work.result()[0], torch.ones(2, 3))
    if rank == 0:
        time.sleep(0.05)  # the other rank goes on in Python
    dist.all_reduce(values, group=group)
    assert torch.equal(values, torch.full((2, 3), 2.0))
    for root in (0, 1):
        for dtype in (torch.int64, torch.bfloat16):
            values = torch.full((700,), rank + 5, dtype=dtype)
            dist.broadcast(values, root, group=group)
            assert bool((values == root + 5).all())


def _check_not_plain(group: ShoalGroup, rank: int) -> None:
    own = torch.full((4, 4), float(rank))
    dist.all_reduce(own[:, 0], group=group)
    dist.all_reduce(own, dist.ReduceOp.MAX, group=group)
    dist.all_reduce(torch._neg_view(own), group=group)
    dist.all_reduce(nn.Parameter(own), group=group)
    assert own.tolist() == [[4.0] * 4] * 4  # 1 in all places, then -2 through its negation, then 4
    half = torch.ones(3, dtype=torch.float16)
    dist.all_reduce(half, group=group)
    assert half.tolist() == [2.0, 2.0, 2.0]
    phases = torch.full((2,), complex(rank, 1.0)).conj()
    group.broadcast(phases, 0).wait()
    assert phases.tolist() == [complex(0.0, -1.0)] * 2
    large = torch.full((native.LARGE_BYTES // 4,), float(rank))
    dist.broadcast(large, 1, group=group)
    assert bool((large == 1.0).all())


def _count_plain_calls(group: ShoalGroup) -> list[str]:
    """Return a list that gets the name of each plain call from now on."""
    taken: list[str] = []
    plain: Any = group._plain_calls

    class Counted:
        def all_reduce(self, *args: Any) -> Any:
            return self._count("all_reduce", plain.all_reduce(*args))

        def broadcast(self, *args: Any) -> Any:
            return self._count("broadcast", plain.broadcast(*args))

        def _count(self, name: str, work: Any) -> Any:
            if work is not None:
                taken.append(name)
            return work

    group._plain_calls = Counted()  # type: ignore[assignment]
    return taken


def test_calls_keep_their_order_behind_one_that_waits() -> None:
    world.run(2, _check_order)


def _check_order() -> None:
    rank, values = dist.get_rank(), torch.ones(100)
    group = dist.new_group()
    if rank == 1:
        time.sleep(0.05)
    first = dist.all_reduce(values, group=group, async_op=True)
    second = dist.all_reduce(values, group=group, async_op=True)
    dist.broadcast(values, 0, group=group)
    assert first.is_completed()
    assert second.is_completed()
    assert bool((values == 4.0).all())
    group.shutdown()
    with pytest.raises(CollectiveFailed, match="cannot be used any more"):
        dist.all_reduce(values, group=group)


def test_an_interrupt_before_python_takes_over_closes_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    board = meet(2)[0]
    board.progress = own_progress().join_group("plain calls", [0, 1])
    queue = CallQueue(Waiter(board, PeerLiveness({}), lambda: 1.0), "plain calls")

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(queue, "go_on", interrupt)
    plain = plain_calls(queue, NativeCalls(board), board)
    assert plain is not None
    opts = Options.AllreduceOptions()
    opts.asyncOp = False
    with pytest.raises(KeyboardInterrupt):  # the other rank never comes
        plain.all_reduce([torch.ones(3)], opts)
    assert isinstance(queue.error, KeyboardInterrupt)
    assert not queue.turn.locked()
    assert plain.all_reduce([torch.ones(3)], opts) is None
