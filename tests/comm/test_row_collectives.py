"""Gathered rows: losses that couple samples have the gradients of one device on any shares."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.comm.axis import Axis
from shoal.comm.row_collectives import gather_rows, sum_over_ranks
from shoal.errors import UsageError
from shoal.testing import world

SHARES = [[5, 2], [3, 2, 4]]
"""Rows of each rank; the data are those of nine samples or fewer."""


def the_world() -> Axis:
    return Axis(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))


def tower(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def clip(a: Tensor, b: Tensor) -> Tensor:
    """Return the contrastive loss of each pair of rows."""
    logits = F.normalize(a, dim=1) @ F.normalize(b, dim=1).T / 0.1
    pairs = torch.arange(len(a))
    return (
        F.cross_entropy(logits, pairs, reduction="none")
        + F.cross_entropy(logits.T, pairs, reduction="none")
    ) / 2


def batch_hard_triplet(a: Tensor, b: Tensor) -> Tensor:
    """Return for each row the loss of its farthest pair and its nearest other."""
    distances = (a[:, None] - b[None]).square().sum(2)
    same = torch.eye(len(a), dtype=torch.bool)
    nearest = distances.masked_fill(same, torch.inf).min(1).values
    return F.relu(distances.diagonal() - nearest + 1)


def root_mean_square(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).square().mean().sqrt()


def dice_of_the_batch(a: Tensor, b: Tensor) -> Tensor:
    p, q = a.sigmoid(), b.sigmoid()
    return 1 - 2 * (p * q).sum() / (p.sum() + q.sum())


def barlow_twins(a: Tensor, b: Tensor) -> Tensor:
    a, b = (a - a.mean(0)) / a.std(0), (b - b.mean(0)) / b.std(0)
    correlation = a.T @ b / len(a)
    return (correlation - torch.eye(a.shape[1])).square().sum()


WHOLE: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda a, b: clip(a, b).mean(),
    lambda a, b: batch_hard_triplet(a, b).mean(),
    root_mean_square,
    dice_of_the_batch,
    barlow_twins,
]
BY_ROWS: list[Callable[[Tensor, Tensor], Tensor]] = [clip, batch_hard_triplet]


def gradients(models: list[nn.Module]) -> Tensor:
    return torch.cat([p.grad.flatten() for m in models for p in m.parameters()])


def worst_error(shares: list[int]) -> float:
    """Return the largest relative error of any loss in either style."""
    axis = the_world()
    rows = sum(shares)
    own = slice(sum(shares[: axis.rank]), sum(shares[: axis.rank + 1]))
    torch.manual_seed(5)
    x, y = torch.randn(rows, 6).double(), torch.randn(rows, 6).double()
    styles = [(loss, loss, slice(None)) for loss in WHOLE]
    styles += [(lambda a, b, f=loss: f(a, b).mean(), loss, own) for loss in BY_ROWS]
    errors = []
    for whole, loss, kept in styles:
        models = [tower(1), tower(2)]
        whole(models[0](x), models[1](y)).backward()
        expected = gradients(models)
        models = [tower(1), tower(2)]
        gathered = [gather_rows(m(z[own]), axis) for m, z in zip(models, (x, y), strict=True)]
        value = loss(*gathered)
        mean = value[kept].mean() if value.dim() else value
        (mean * shares[axis.rank] / rows).backward()
        actual = axis.all_reduce(gradients(models))
        errors.append(((actual - expected).norm() / expected.norm()).item())
    return max(errors)


@pytest.mark.parametrize("shares", SHARES, ids=str)
def test_coupled_losses_have_the_gradients_of_one_device(shares: list[int]) -> None:
    assert max(world.run(len(shares), worst_error, shares)) < 1e-10


def gathers_of_all_kinds() -> None:
    axis = the_world()
    rank = axis.rank
    for dtype in (torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64):
        own = torch.full((2 * rank, 3), rank).to(dtype)  # the first rank has no rows
        expected = torch.tensor([1] * 2 + [2] * 4)[:, None].expand(6, 3).to(dtype)
        assert torch.equal(gather_rows(own, axis), expected)
    assert gather_rows(torch.ones(0, 3), axis).shape == (0, 3)
    assert gather_rows(torch.ones(rank, 0), axis).shape == (3, 0)
    assert gather_rows(torch.ones(rank), axis, [0, 1, 2]).shape == (3,)
    # A rank whose rows do not count gives none, and its backward pass takes part all the same.
    x = torch.full((1, 2), float(rank + 1), requires_grad=True)
    (gather_rows(x[:0] if rank == 1 else x, axis).prod() * (rank + 1)).backward()
    assert x.grad is not None
    assert x.grad.flatten().tolist() == [[54.0, 54.0], [0.0, 0.0], [18.0, 18.0]][rank]
    with pytest.raises(UsageError, match="same dtype and the same shape"):
        gather_rows(torch.ones(2, 3 + (rank == 1)), axis)
    with pytest.raises(UsageError, match="scalar"):
        gather_rows(torch.ones(()), axis)
    total = gather_rows(x, axis).square().sum()
    with pytest.raises(UsageError, match="create_graph"):
        torch.autograd.grad(total, x, create_graph=True)


def test_rows_of_any_dtype_and_number_are_gathered_and_mistakes_are_errors() -> None:
    world.run(3, gathers_of_all_kinds)


def second_derivative_of_a_sum() -> tuple[float, float]:
    axis = the_world()
    x = torch.tensor(float(axis.rank + 1), dtype=torch.float64, requires_grad=True)
    total = sum_over_ranks(x, axis)  # 3
    (first,) = torch.autograd.grad(total**3, x, create_graph=True)  # 2 ranks x 3 total^2
    first.backward()
    assert x.grad is not None
    return first.item(), x.grad.item()


def test_a_sum_over_ranks_is_differentiable_twice() -> None:
    # The objective of all ranks is 2 total^3; the second pass differentiates the sum of both.
    assert world.run(2, second_derivative_of_a_sum) == [(54.0, 72.0)] * 2


def test_one_rank_gathers_nothing() -> None:
    x = torch.ones(2, requires_grad=True)
    alone = Axis(0, 1, torch.device("cpu"))
    assert gather_rows(x, alone) is x
    assert sum_over_ranks(x, alone) is x
