"""Collectives under torch.inference_mode, and of tensors that were made under it, are Gloo's."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import shoal
from shoal.testing import world

RANKS = 2
SCATTER_SINGLE = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def test_collectives_work_before_in_and_after_inference_mode() -> None:
    assert world.run(RANKS, _evaluate_then_train) == [True] * RANKS


def _evaluate_then_train() -> bool:
    for call in CALLS:
        for inference in (True, False, True):
            with torch.inference_mode(inference):
                kept = torch.full((6,), dist.get_rank() + 1, dtype=torch.int32)
                call(kept.clone())
        call(kept)
    return True


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
