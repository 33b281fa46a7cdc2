"""Collectives of tensors whose memory is not exactly their elements."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from shoal.testing import world
from tests.harness.in_turn import in_turn

STRANGE: dict[str, Callable[[Tensor], Tensor]] = {
    "every second": lambda t: torch.empty(2 * len(t)).fill_(100.0)[::2].copy_(t),
    "a column": lambda t: torch.empty(len(t), 3).fill_(100.0)[:, 1].copy_(t),
    "transposed": lambda t: torch.empty(len(t) // 2, 2).t().copy_(t.view(2, -1)),
    "of an opposite sign": lambda t: torch.complex(torch.zeros_like(t), -t).conj().imag,
    "still on its way": lambda t: functional.all_reduce(
        t / dist.get_world_size(), "sum", dist.group.WORLD
    ),
}


def test_it_does_not_matter_how_a_tensor_lies() -> None:
    for right in world.run(2, in_turn, _reduce, *zip(STRANGE, strict=True)):
        assert dict(zip(STRANGE, right, strict=True)) == dict.fromkeys(STRANGE, True)


def _reduce(how: str) -> bool:
    """Reduce such a tensor of all ranks, then one of the first rank only."""
    right, rank = True, dist.get_rank()
    for length in (2, 1000, 40_000):
        for all_have_it in (True, how == "still on its way"):
            numbers = torch.arange(length, dtype=torch.float32) + (
                1 if how == "still on its way" else rank
            )
            own = STRANGE[how](numbers) if all_have_it or rank == 0 else numbers
            expected = sum(
                torch.arange(length) + (1 if how == "still on its way" else r) for r in range(2)
            )
            dist.all_reduce(own)
            right &= torch.equal(own.reshape(-1) + 0, expected.float())
    return right


def test_what_lies_between_the_numbers_stays_as_it_is() -> None:
    assert world.run(2, _between) == [True, True]


def _between() -> bool:
    all_of_it = torch.full((1000, 3), 100.0)
    all_of_it[:, 1] = dist.get_rank()
    dist.all_reduce(all_of_it[:, 1])
    return all_of_it[:, 1].eq(1).all().item() and all_of_it[:, [0, 2]].eq(100).all().item()


def test_one_number_that_stands_for_many_is_refused() -> None:
    assert world.run(2, _expanded) == [True, True]


def _expanded() -> bool:
    with pytest.raises(RuntimeError, match="single memory location"):
        dist.all_reduce(torch.ones(1).expand(1000))
    return True


def test_zeros_that_are_nowhere_are_refused() -> None:
    assert world.run(2, _nowhere) == [True, True]


def _nowhere() -> bool:
    with pytest.raises(RuntimeError, match="ZeroTensor"):
        dist.all_reduce(torch._efficientzerotensor(1000))
    return True
