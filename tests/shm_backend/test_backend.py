"""The backend "shoal" in processes gives the results of Gloo for all shapes, dtypes and groups."""

import subprocess
import sys

import backend_parity_calls
import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.distributed import _functional_collectives as functional

from shoal.platform.tensors import DTYPES
from shoal.shm_backend.group import ShoalGroup
from shoal.testing import world

PLANS = st.lists(
    st.tuples(st.sampled_from(sorted(backend_parity_calls.CALLS)), st.integers(0, 2**20)),
    min_size=6,
    max_size=14,
)


@pytest.mark.slow
@given(st.integers(2, 4), PLANS)
@settings(
    max_examples=4, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)  # to shrink takes long
def test_any_calls_come_to_what_they_come_to_on_gloo(
    ranks: int, plan: backend_parity_calls.Plan
) -> None:
    world.run(ranks, backend_parity_calls.compare, plan)


def test_each_call_comes_to_what_it_comes_to_on_gloo() -> None:
    found = world.run(3, backend_parity_calls.compare_each, 8)
    used = {kind for kinds in found for kind, calls in kinds.items() if calls}
    assert used == set(backend_parity_calls.CALLS) - backend_parity_calls.GLOOS


@pytest.mark.parametrize(
    "order", ["torch, shoal", pytest.param("shoal, torch", marks=pytest.mark.slow)]
)
def test_an_import_of_shoal_is_enough(order: str) -> None:
    known = "torch.distributed.Backend('shoal') in torch.distributed.Backend.backend_list"
    program = f"import {order}; print({known})"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "True\n"


def test_shoal_alone_imports_no_torch() -> None:
    subprocess.run(
        [sys.executable, "-c", "import shoal, sys; assert 'torch' not in sys.modules"], check=True
    )


def test_every_type_of_numbers_is_carried() -> None:
    assert world.run(2, _carry_every_type) == [len(DTYPES)] * 2


def _carry_every_type() -> int:
    ours, carried = dist.group.WORLD, 0
    assert isinstance(ours, ShoalGroup)
    for dtype in DTYPES:
        before = ours._board.calls
        made = [(torch.arange(48, dtype=torch.uint8) + rank) % 2 for rank in range(2)]
        numbers = [one.clone().view(dtype) for one in made]
        rows = [torch.zeros_like(numbers[0]) for _ in range(2)]
        dist.all_gather(rows, numbers[dist.get_rank()])
        dist.broadcast(numbers[dist.get_rank()], src=1)
        alike = [torch.equal(a.view(torch.uint8), b) for a, b in zip(rows, made, strict=True)]
        carried += all(alike) and torch.equal(numbers[0].view(torch.uint8), made[1]) == (
            dist.get_rank() == 0
        )
        assert ours._board.calls == before + 2
    return carried


def test_a_tensor_that_autograd_keeps_may_be_reduced() -> None:
    """As on Gloo, autograd does not see the result."""
    assert world.run(2, _reduce_a_parameter) == [(3.0, 0), (3.0, 0)]


def _reduce_a_parameter() -> tuple[float, int]:
    assert isinstance(dist.group.WORLD, ShoalGroup)
    parameter = torch.nn.Parameter(torch.full((4,), dist.get_rank() + 1.0))
    dist.all_reduce(parameter)
    with torch.inference_mode():
        kept = torch.ones(3)
    dist.all_reduce(kept)
    assert kept.tolist() == [2.0, 2.0, 2.0]
    return parameter[0].item(), parameter._version


def test_a_tensor_that_gloo_would_fill_in_another_order_is_refused() -> None:
    assert world.run(2, _exchange_into_transposed) == [True, True]


def _exchange_into_transposed() -> bool:
    output = torch.empty(3, 2).t()
    with pytest.raises(ValueError, match=r"alltoall_base by Gloo takes contiguous tensors, not"):
        dist.all_to_all_single(output, torch.arange(6.0).view(2, 3))
    for call in (dist.all_reduce, lambda tensor: dist.reduce(tensor, dst=0)):
        with torch.inference_mode(), pytest.raises(ValueError, match="takes contiguous tensors"):
            call(torch.ones(6)[::2])
    with pytest.raises(ValueError, match=r"Pass tensor\.resolve_conj\(\)\.contiguous\(\)"):
        dist.gather(torch.ones(2, 3, dtype=torch.complex64).conj(), dst=1 - dist.get_rank())
    return True


def test_functional_collectives_go_through_shared_memory() -> None:
    """DTensor calls them. Each is a call of a list of one tensor, or of several."""
    assert world.run(2, _call_functionally) == [[3.0, 1.0, 2.0, 3.0, 4.0, 6.0]] * 2


def _call_functionally() -> list[float]:
    group, own = dist.group.WORLD, torch.full((1,), dist.get_rank() + 1.0)
    assert isinstance(group, ShoalGroup)
    before, rows = group._board.calls, torch.ones(2) * own
    found = [
        functional.all_reduce(own, "sum", group),
        functional.all_gather_tensor(own, 0, group),
        functional.reduce_scatter_tensor(rows, "sum", 0, group),
        functional.reduce_scatter_tensor_coalesced([rows, rows + 0.5], "sum", [0, 0], group)[1],
        functional.all_gather_into_tensor_coalesced([own, own * 3], group)[1][1:],
    ]
    values: list[float] = torch.cat([tensor + 0 for tensor in found]).tolist()
    assert group._board.calls == before + 7
    return values


def test_many_calls_that_nobody_waits_for_at_once_are_made_in_order() -> None:
    assert world.run(3, _many_at_once) == [True] * 3


def _many_at_once() -> bool:
    tensors = [
        torch.full((length,), dist.get_rank() + 1.0) for length in (1, 400_000, 10, 70_000) * 10
    ]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    futures = [work.get_future() for work in works]
    dist.all_reduce(last := torch.ones(2))
    for work in reversed(works):
        work.wait()
    values = [future.wait()[0] for future in futures]
    return all((tensor == 6).all().item() for tensor in (*tensors, *values)) and last.tolist() == [
        3.0,
        3.0,
    ]


def test_a_call_that_is_complete_gives_the_kind_of_future_that_gloo_gives() -> None:
    assert world.run(2, _kinds_of_futures) == [(True, 2.0)] * 2


def _kinds_of_futures() -> tuple[bool, float]:
    works = [
        dist.all_reduce(torch.ones(3), group=group, async_op=True)
        for group in (dist.group.WORLD, dist.new_group(backend="gloo"))
    ]
    ours, theirs = (work.get_future() for work in works if work is not None)
    value: float = ours.then(lambda done: done.value()[0]).wait()[1].item()
    theirs.wait()
    return type(ours) is type(theirs), value
