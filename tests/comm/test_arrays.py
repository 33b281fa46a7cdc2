"""shoal.allreduce, allgather, broadcast and barrier return the kind of array they are given."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import shoal
from shoal.errors import CollectiveFailed, UsageError
from shoal.testing import world


def test_the_same_kind_comes_back_as_went_in() -> None:
    assert world.run(3, _kinds) == [True] * 3


def _kinds() -> bool:
    rank = dist.get_rank()
    tensor = torch.full((2, 3), float(rank))
    assert torch.equal(shoal.allreduce(tensor), torch.ones(2, 3))
    assert torch.equal(tensor, torch.full((2, 3), float(rank)))  # what went in is as it was
    for op, expected in (("sum", 6.0), ("min", 1.0), ("max", 3.0), ("product", 6.0)):
        array = np.asfortranarray(np.full((2, 2), rank + 1.0))
        found = shoal.allreduce(array, op=op)  # type: ignore[arg-type]
        assert isinstance(found, np.ndarray)
        assert found.dtype == np.float64
        assert (found == expected).all()
    assert shoal.allreduce(np.array(rank), op="sum") == 3  # of no dimensions
    assert shoal.broadcast(torch.tensor([rank == 1, False]), root=1).tolist() == [True, False]
    halves = shoal.broadcast(np.full(3, rank, dtype=np.float16), root=2)
    assert halves.dtype == np.float16
    assert halves.tolist() == [2, 2, 2]
    foreign_bytes = shoal.allreduce(np.array([rank, 1.0], dtype=">f4"))
    assert (foreign_bytes.dtype, foreign_bytes.tolist()) == (np.dtype(">f4"), [1.0, 1.0])
    large = shoal.allreduce(
        torch.tensor([40000.0], dtype=torch.float16)
    )  # of which the sum is none
    assert (large.dtype, large.item()) == (torch.float16, 40000.0)
    shoal.barrier()
    return True


def test_arrays_of_different_lengths_are_gathered_in_the_order_of_ranks() -> None:
    assert world.run(3, _gathered) == [True] * 3


def _gathered() -> bool:
    rank = dist.get_rank()
    found = shoal.allgather(torch.full((rank, 2), rank, dtype=torch.int32))  # rank 0 has none
    assert found.tolist() == [[1, 1], [2, 2], [2, 2]]
    assert found.dtype == torch.int32
    assert shoal.allgather(np.array(rank)).tolist() == [0, 1, 2]
    assert shoal.allgather(torch.zeros(0, 3)).shape == (0, 3)
    return True


def test_ranks_that_make_different_calls_are_all_told_who_calls_what() -> None:
    assert world.run(2, _differing) == [True] * 2


def _differing() -> bool:
    rank = dist.get_rank()
    with pytest.raises(
        CollectiveFailed,
        match=r"rank 0 all_reduce\(float32 \(2,\), op='mean'\); rank 1 barrier\(\)",
    ):
        shoal.allreduce(torch.ones(2)) if rank == 0 else shoal.barrier()
    with pytest.raises(
        CollectiveFailed, match=r"float32 \(6,\).*float32 \(2, 3\)"
    ):  # as many numbers, another shape
        shoal.allreduce(torch.ones((6,) if rank == 0 else (2, 3)))
    shoal.barrier()  # and the ranks go on
    return True


def test_one_process_gets_copies() -> None:
    array = np.arange(3.0)
    found = shoal.allreduce(array)
    found += 1
    assert array.tolist() == [0.0, 1.0, 2.0]
    assert shoal.allgather(array).tolist() == array.tolist()
    assert shoal.broadcast(array).tolist() == array.tolist()
    shoal.barrier()


COMPLEX = torch.ones(2, dtype=torch.complex64)


@pytest.mark.parametrize(
    ("value", "arguments", "message"),
    [
        (3.0, {"op": "mean"}, "float is not supported"),
        (np.array(["a"]), {"op": "mean"}, "torch cannot take"),
        (torch.ones(2).to_sparse(), {"op": "mean"}, "to_dense"),
        (np.ma.array([1.0, 999.0], mask=[False, True]), {"op": "mean"}, "filled"),
        (torch.ones(2, requires_grad=True) * 2, {"op": "mean"}, "detach"),
        (torch.ones(2, dtype=torch.int64), {"op": "mean"}, "op='sum'"),
        (torch.ones(2, dtype=torch.bool), {"op": "mean"}, "mean of bool"),
        (COMPLEX, {"op": "min"}, "have no min"),
        (COMPLEX, {"op": "max"}, "have no max"),
        (COMPLEX, {"op": "product"}, r"shoal\.all_gather\(value\[None\]\)\.prod\(0\)"),
        (torch.ones(2), {}, "say the operation: op='mean' or op='sum'"),
        (torch.ones(2), {"op": "avg"}, "op='avg' is not known. Use one of mean, sum"),
        (torch.ones(2), {"op": dist.ReduceOp.BAND}, "BAND.* is not known. Use one of mean, sum"),
    ],
)
def test_what_cannot_be_reduced_is_refused_with_the_cure(
    value: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        shoal.all_reduce(value, **arguments)


def test_ranks_that_have_not_met_are_told_to_call_init(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29599"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=r"rank 1 of 2.*shoal\.init\(\)"):
        shoal.barrier()


def _by_names_of_torch() -> None:
    tensor = torch.tensor([float(dist.get_rank())])
    assert shoal.all_reduce(tensor, op="sum") == shoal.all_reduce(tensor, dist.ReduceOp.SUM) == 1
    assert shoal.all_reduce(tensor, dist.ReduceOp.AVG) == shoal.allreduce(tensor) == 0.5
    assert shoal.all_gather(tensor).tolist() == shoal.allgather(tensor).tolist() == [0, 1]
    assert shoal.broadcast(tensor, src=1) == shoal.broadcast(tensor, 1) == 1
    assert shoal.broadcast(tensor, root=1) == 1


def test_arguments_are_named_as_those_of_torch_and_older_names_stay() -> None:
    world.run(2, _by_names_of_torch)
