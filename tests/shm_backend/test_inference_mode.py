"""Collectives under torch.inference_mode, and of tensors that were made under it."""

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shoal
from shoal.shm_backend.group import ShoalGroup
from shoal.testing import world

RANKS = 2
SCATTER_SINGLE = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def test_collectives_work_before_in_and_after_inference_mode() -> None:
    assert world.run(RANKS, _evaluate_then_train) == [True] * RANKS


def _evaluate_then_train() -> bool:
    """Evaluate, train, evaluate: each call meets layouts that were first used in the other mode."""
    for length in (6, 100_000):
        for inference in (True, False, True):
            with torch.inference_mode(inference):
                _check_all(length, torch.int64)
                _check_all(length, torch.float32)
        with torch.inference_mode():
            kept = [torch.full((length,), dist.get_rank() + 1, dtype=torch.int32) for _ in CALLS]
            gaps = torch.ones(4, 6).t()[::2]
        for call, tensor in zip(CALLS, kept, strict=True):
            call(tensor)
        dist.all_reduce(gaps)
        assert gaps.tolist() == [[2.0] * 4] * 3
    return True


def _check_all(length: int, dtype: torch.dtype) -> None:
    for call in CALLS:
        call(torch.full((length,), dist.get_rank() + 1, dtype=dtype))


def _all_reduce(tensor: Tensor) -> None:
    dist.all_reduce(tensor, dist.ReduceOp.PRODUCT)
    assert (tensor == 2).all()


def _all_reduce_of_arrays(tensor: Tensor) -> None:
    assert (shoal.allreduce(tensor, op="max") == 2).all()


def _broadcast(tensor: Tensor) -> None:
    dist.broadcast(tensor, src=1)
    assert (tensor == 2).all()


def _all_gather(tensor: Tensor) -> None:
    rows = [torch.zeros_like(tensor) for _ in range(RANKS)]
    dist.all_gather(rows, tensor)
    assert [row[0].item() for row in rows] == [1, 2]


def _reduce_scatter(tensor: Tensor) -> None:
    out = torch.zeros(len(tensor) // RANKS, dtype=tensor.dtype)
    SCATTER_SINGLE(out, tensor)
    assert (out == 3).all()


def _all_to_all(tensor: Tensor) -> None:
    out = torch.zeros_like(tensor)
    dist.all_to_all_single(out, tensor)
    assert out.view(RANKS, -1)[:, 0].tolist() == [1, 2]


CALLS: tuple[Callable[[Tensor], None], ...] = (
    *(_all_reduce, _all_reduce_of_arrays, _broadcast, _all_gather),
    *(_reduce_scatter, _all_to_all),
)


def test_a_late_rank_does_not_matter_to_asynchronous_calls_of_inference_tensors() -> None:
    assert world.run(RANKS, _reduce_late) == [[3, 3, 3, 3]] * RANKS


def _reduce_late() -> list[int]:
    with torch.inference_mode():
        tensors = [torch.full((3,), dist.get_rank() + 1) for _ in range(2)]
        tensors.append(torch.full((6, 2), dist.get_rank() + 1).t())
        out = torch.zeros(4, dtype=torch.int64)
        time.sleep(0.1 * dist.get_rank())
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        works.append(dist.all_to_all_single(out, torch.full((4,), 3), async_op=True))
        for work in works:
            assert work is not None
            work.wait()
    return [int(tensor.flatten()[0]) for tensor in (*tensors, out)]


def test_a_thread_that_fails_fails_its_calls_and_goes_on() -> None:
    assert world.run(RANKS, _fail_in_the_thread) == [True] * RANKS


def _fail_in_the_thread() -> bool:
    group = dist.new_group()
    assert isinstance(group, ShoalGroup)
    if dist.get_rank() == 0:
        group._board.fail = _refuse  # type: ignore[method-assign]
        # The other rank never comes: the wait for it fails, and so does the report of the failure.
        options = torch._C._distributed_c10d.AllreduceOptions()
        works = [group.allreduce([torch.ones(2)], options)]
        assert group._queue is not None
        group._queue._waiter.set_deadline(0.0)
        works.append(group.allreduce([torch.ones(3, dtype=torch.int64)], options))
        for work in works:
            with pytest.raises(RuntimeError, match=r"left its group|refused"):
                work.wait()
        assert group._queue._thread is not None
        assert group._queue._thread.is_alive()
    dist.barrier()
    return True


def _refuse(text: str) -> None:
    raise RuntimeError("refused")
