"""Flipped bits: found by comparing replicas, and named."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.comm.norm import to_local
from shoal.comm.tensor_digest import as_bytes, tensor_digest
from shoal.errors import LaunchError, ReplicasDiffer
from shoal.run.replica_check import replicated_tensors
from shoal.testing import world


def flip(tensor: Tensor, bit: int) -> None:
    data = as_bytes(to_local(tensor)).numpy()  # torch does not notice, as with a faulty memory
    data[bit // 8 % len(data)] ^= 1 << bit % 8


def trained(strategy: str) -> tuple[shoal.Run, Any]:
    run = shoal.init(strategy, announce=lambda _: None)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    model, optimizer = run.prepare(model, torch.optim.Adam(model.parameters()))
    for _ in range(2):
        optimizer.zero_grad()
        run.forward_backward(lambda x: model(x).square().mean(), torch.ones(4, 6), rows=4)
        optimizer.step()
    return run, optimizer


def flips_bits(strategy: str, count: int, seed: int) -> list[str]:
    """Flip a bit of one rank, and check; again `count` times. Returns what was not found."""
    run, optimizer = trained(strategy)
    run.check_replicas()
    local_model = run._prepared.local_model()
    tensors = replicated_tensors(local_model, [optimizer], run.mesh)
    random_ = random.Random(seed)  # the same on all ranks
    missed = []
    for _ in range(count):
        rank, index, bit = (
            random_.randrange(run.world_size),
            random_.random(),
            random_.randrange(10**6),
        )
        entry = tensors[int(index * len(tensors))]
        if run.rank == rank:
            flip(entry.value, bit)
        told = ""
        try:
            run.check_replicas()
        except ReplicasDiffer as error:
            told = str(error)
        named = run.mesh.broadcast_str(entry.name) if "pipeline" not in strategy else ""
        if f"rank {rank} holds" not in told or named not in told:
            missed.append(f"{entry.name}: {told}")
        if run.rank == rank:
            flip(entry.value, bit)  # back
    run.check_replicas()
    return missed


def flips_one(strategy: str) -> None:
    run, optimizer = trained(strategy)
    tensors = replicated_tensors(run._prepared.local_model(), [optimizer], run.mesh)
    if run.rank == 1:
        flip(tensors[1].value, 12)
    run.check_replicas()


def test_flipped_bits_of_three_replicas_are_found_and_named() -> None:
    assert world.run(3, flips_bits, "ddp", 100, 1) == [[]] * 3


def test_two_replicas_that_differ_are_told_as_a_pair() -> None:
    message = r"ranks 0 and 1 should hold the same bits, and differ in 0\.bias"
    with pytest.raises(LaunchError, match=message):
        world.run(2, flips_one, "ddp")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ranks"), [("server=1", 3), ("tensor=2", 6), ("pipeline=2", 6), ("ddp", 4)]
)
def test_flipped_bits_are_found_under_strategies_with_replicas(strategy: str, ranks: int) -> None:
    assert world.run(ranks, flips_bits, strategy, 30, 2) == [[]] * ranks


def finds_nothing(strategy: str) -> None:
    trained(strategy)[0].check_replicas()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ranks"), [("zero3", 2), ("zero1", 3), ("local=2", 2), ("zero2,hybrid=2", 4)]
)
def test_ranks_without_replicas_find_nothing(strategy: str, ranks: int) -> None:
    world.run(ranks, finds_nothing, strategy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (4097, 9)])
def test_each_changed_bit_changes_the_digest_and_strides_do_not(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    values = (torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 100).to(dtype)
    digest = tensor_digest(values)
    assert tensor_digest(values.clone()) == digest
    assert tensor_digest(values.t().contiguous().t() if values.dim() == 2 else values) == digest
    bits = 8 * values.nbytes
    for bit in {0, 1, 7, bits // 2, bits - 1, *range(0, bits, max(1, bits // 50))}:
        other = values.clone()
        flip(other, bit)
        assert tensor_digest(other) != digest
