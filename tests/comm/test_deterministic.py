"""Means over ranks with the same bits at every position and on every backend."""

import random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shoal.comm.axis import Axis
from shoal.comm.deterministic import rank_order_mean, sums_in_order, use_ordered_mean
from shoal.testing import world


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_mean_has_the_same_bits_on_both_backends_at_every_position(ranks: int) -> None:
    assert world.run(ranks, _means, random.randrange(400_000)) == [True] * ranks


def _means(some_length: int) -> bool:
    gloo = dist.new_group(backend="gloo")
    assert sums_in_order()
    assert not sums_in_order(gloo)
    made = torch.Generator().manual_seed(dist.get_rank())
    for length in (1, 5, 10_000, 300_001, some_length):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            tensor = torch.randn(length, generator=made).to(dtype)
            terms = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
            dist.all_gather(terms, tensor)
            expected = sum(terms[1:], terms[0]) / len(terms)
            ours, theirs = tensor.clone(), tensor.clone()
            shifted = torch.cat([torch.ones(7, dtype=dtype), tensor])
            rank_order_mean(ours)
            rank_order_mean(theirs, gloo)
            rank_order_mean(shifted, gloo)
            for found in (ours, theirs, shifted[7:]):
                assert torch.equal(found, expected), (length, dtype)
    with_gaps = torch.arange(12.0).view(3, 4).t()
    assert rank_order_mean(with_gaps, gloo).equal(torch.arange(12.0).view(3, 4).t())
    return True


def test_gradients_of_an_engine_are_ordered_means() -> None:
    first, *others = world.run(3, _gradient)
    assert all(torch.equal(first, other) for other in others)


def _gradient() -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 300), nn.ReLU(), nn.Linear(300, 3))
    batch = torch.randn(8, 40, generator=torch.Generator().manual_seed(dist.get_rank()))
    model(batch).pow(2).mean().backward()
    expected = [rank_order_mean(p.grad.clone()) for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    ddp, failures = DistributedDataParallel(model, gradient_as_bucket_view=True), list[Exception]()
    seen = list[int]()
    use_ordered_mean(
        ddp,
        Axis(dist.get_rank(), dist.get_world_size(), torch.device("cpu")),
        failures,
        lambda bucket: seen.append(bucket.numel()),
    )
    for _ in range(2):
        model.zero_grad()
        ddp(batch).pow(2).mean().backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not failures
    assert sum(seen) == 2 * sum(p.numel() for p in model.parameters())
    return torch.cat([gradient.flatten() for gradient in found])
