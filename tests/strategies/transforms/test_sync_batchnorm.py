"""`sync_batchnorm`: BatchNorm on several ranks computes what it computes on one device."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.comm.axis import Axis
from shoal.strategies.transforms.sync_batchnorm import CountedRows, SyncedForward, batchnorms
from shoal.testing import world


def net(**options: Any) -> nn.Module:
    """Return a model with BatchNorm of one, two and three dims of space."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (2, 2, 2, 2)),
        nn.Conv3d(2, 3, 2, padding=1),
        nn.BatchNorm3d(3, **options),
        nn.Flatten(2, 3),
        nn.Tanh(),
        nn.Conv2d(3, 2, 2),
        nn.BatchNorm2d(2, **options),
        nn.Flatten(1),
        nn.Linear(32, 4),
        nn.BatchNorm1d(4, **options),
    ).double()


def synced(model: nn.Module, axis: Axis, rows: CountedRows) -> nn.Module:
    for norm in batchnorms(model).values():
        norm.forward = SyncedForward(norm, axis, rows)  # type: ignore[method-assign]
    return model


def loss_of(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"momentum": None},
    {"track_running_stats": False},
    {"affine": False, "momentum": 0.3},
]


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    """Return the sum over the samples of a gradient penalty, which needs second derivatives."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return gradient.square().sum()


def worst_error(shares: list[int]) -> float:
    """Train two steps with each kind of BatchNorm; return the largest relative error."""
    axis = Axis(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    rows = sum(shares)
    start = sum(shares[: axis.rank])
    count = shares[axis.rank]
    # A rank without rows computes the first sample, with weight 0.
    own = slice(start, start + count) if count else slice(0, 1)
    errors = []

    def compare(actual: Tensor, expected: Tensor) -> None:
        errors.append(((actual - expected).norm() / expected.norm().clamp(min=1e-3)).item())

    for options in OPTIONS:
        torch.manual_seed(1)
        plain, ours = net(**options), synced(net(**options), axis, CountedRows())
        for norm in batchnorms(ours).values():
            forward = norm.forward
            assert isinstance(forward, SyncedForward)
            assert forward.rows is not None
            forward.rows.count = count > 0
        for _ in range(2):
            x, y = torch.randn(rows, 16).double() * 3 + 10, torch.randint(4, (rows,))
            for model in (plain, ours):
                model.zero_grad()
            (loss_of(plain(x), y) + penalty(plain, x) / rows).backward()
            objective = loss_of(ours(x[own]), y[own]) * count / rows
            (objective + penalty(ours, x[own]) * (count > 0) / rows).backward()
            for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
                assert one.grad is not None
                assert other.grad is not None
                compare(axis.all_reduce(one.grad), other.grad)
        for one, other in zip(ours.buffers(), plain.buffers(), strict=True):
            compare(one.double(), other.double())
        x = torch.randn(3, 16).double()
        compare(ours.eval()(x), plain.eval()(x))
    return max(errors)


@pytest.mark.parametrize("shares", [[3, 2, 4], [4, 0]], ids=str)
def test_gradients_and_statistics_are_those_of_one_device(shares: list[int]) -> None:
    assert max(world.run(len(shares), worst_error, shares)) < 1e-10


def other_circumstances() -> None:
    axis = Axis(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    own = slice(0, 5) if axis.rank == 0 else slice(5, 7)
    torch.manual_seed(1)
    x = torch.randn(7, 4, 2) * 3 + 100
    layer = nn.BatchNorm1d(4)
    expected = copy.deepcopy(layer)(x)
    synced(layer, axis, CountedRows())
    # In half precision the statistics are in single precision.
    half = layer(x[own].bfloat16())
    assert half.dtype is torch.bfloat16
    rounded = nn.BatchNorm1d(4)(x.bfloat16().float())[own]
    assert torch.allclose(half.float(), rounded, atol=0.02)
    assert layer.running_mean is not None
    assert layer.running_mean.dtype is torch.float32
    # A copy communicates, and has parameters of its own; a pickle computes alone.
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        layer.weight.zero_()
    assert torch.allclose(twin(x[own]), expected[own], atol=1e-4)
    alone = pickle.loads(pickle.dumps(layer))
    with torch.no_grad():
        alone.weight.fill_(1)
    assert torch.allclose(alone(x[own]), nn.BatchNorm1d(4)(x[own]), atol=1e-4)
    # Where all ranks have the whole batch, as in `update_bn`, it counts once.
    once = nn.BatchNorm1d(4).double()
    with torch.no_grad():
        once(x.double())
        synced(again := nn.BatchNorm1d(4).double(), axis, CountedRows())(x.double())
    torch.testing.assert_close(again.running_var, once.running_var, rtol=1e-10, atol=0)
    # In evaluation, and where the statistics are frozen, nothing is sent.
    if axis.rank == 0:
        layer.eval()(x[own])
    # One value for each channel in all is an error, on all ranks.
    layer.train()
    forward = layer.forward
    assert isinstance(forward, SyncedForward)
    assert forward.rows is not None
    forward.rows.count = axis.rank == 0
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(x[:1, :, 0])
    # Stand-ins on all ranks leave the statistics as they are.
    forward.rows.count = False
    before = layer.running_mean.clone()
    assert layer(x[:1]).isfinite().all()
    assert torch.equal(layer.running_mean, before)


def test_half_precision_copies_pickles_evaluation_and_single_values() -> None:
    world.run(2, other_circumstances)
