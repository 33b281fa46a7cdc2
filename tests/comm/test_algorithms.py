"""All-reduce by every algorithm: the sum, with the same bits on all ranks."""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.comm.algorithms import PairwiseLink, ring, tree
from shoal.comm.axis import Axis
from shoal.errors import CollectiveFailed
from shoal.shm_backend.registration import GLOO_BACKEND_NAME
from shoal.strategies.ddp.reduce_functions import PAIRWISE, NamedMean
from shoal.testing import world

MOST_RANKS = 8
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Case(NamedTuple):
    name: str
    ranks: int
    length: int
    dtype: int
    seed: int


CASES = st.builds(
    Case,
    st.sampled_from(sorted(PAIRWISE)),
    st.integers(1, MOST_RANKS),
    st.one_of(st.integers(0, 20), st.sampled_from((1000, 4097, 30_011))),
    st.integers(0, len(DTYPES) - 1),
    st.integers(0, 2**20),
)


@pytest.mark.slow
@given(st.lists(CASES, min_size=12, max_size=12))
@settings(
    max_examples=2, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)  # to shrink takes long
def test_any_algorithm_gives_the_sum_with_the_same_bits_on_every_rank(
    cases: list[Case],
) -> None:
    sums = world.run(MOST_RANKS, _sums, cases)
    for number, case in enumerate(cases):
        made = [_numbers(case, rank) for rank in range(case.ranks)]
        found = [sums[rank][number] for rank in range(case.ranks)]
        torch.testing.assert_close(
            found[0], torch.stack(made).double().sum(0).to(found[0].dtype), rtol=2e-6, atol=1e-5
        )
        assert all(torch.equal(found[0], other) for other in found), case


def _numbers(case: Case, rank: int) -> Tensor:
    """Return integers for short dtypes, so that their sums are exact."""
    dtype, made = DTYPES[case.dtype], torch.Generator().manual_seed(case.seed + rank)
    if dtype.itemsize > 2:
        return torch.randn(case.length, dtype=dtype, generator=made)
    return torch.randint(-9, 10, (case.length,), generator=made).to(dtype)


def _sums(cases: list[Case]) -> list[Tensor]:
    found = []
    for case in cases:
        tensor = _numbers(case, dist.get_rank())
        if dist.get_rank() < case.ranks:
            PAIRWISE[case.name](tensor, PairwiseLink(members=range(case.ranks)))
        found.append(tensor)
    return found


Reduce = Callable[[Tensor, PairwiseLink], None]


@pytest.mark.parametrize("ranks", [4, 6])
def test_only_the_bits_of_a_ring_depend_on_the_position(ranks: int) -> None:
    assert world.run(ranks, _places) == [(True, False)] * ranks


def _places() -> tuple[bool, ...]:
    return tuple(_place_matters(reduce) for reduce in (ring, tree))


def _place_matters(reduce: Reduce) -> bool:
    tensor = torch.randn(3000, generator=torch.Generator().manual_seed(dist.get_rank()))
    turned = tensor.roll(1001)
    pairs = PairwiseLink()
    reduce(tensor, pairs)
    reduce(turned, pairs)
    return not torch.equal(tensor.roll(1001), turned)


@pytest.mark.parametrize(
    "hosts",
    ["AABB", pytest.param("ABAB", marks=pytest.mark.slow), "AABCC"]
    + [pytest.param(hosts, marks=pytest.mark.slow) for hosts in ("ABC", "AAAA")],
)
def test_a_mean_over_hosts_is_the_same_bits_on_all_their_ranks(hosts: str) -> None:
    for mean, expected, said in world.run(len(hosts), _mean_over, hosts):
        torch.testing.assert_close(mean, expected, rtol=1e-12, atol=1e-12)
        count = len(set(hosts))
        assert (
            said == f"all-reduce: hierarchical, over {len(hosts)} ranks "
            f"on {count} host{'s' * (count > 1)}"
        )


def _on_hosts(name: str, hosts: str) -> NamedMean:
    os.environ["SHOAL_HOST"] = hosts[dist.get_rank()]
    made = NamedMean(name, Axis(dist.get_rank(), dist.get_world_size(), torch.device("cpu")))
    del os.environ["SHOAL_HOST"]
    return made


def _mean_over(hosts: str) -> tuple[Tensor, Tensor, str]:
    reduce, size = _on_hosts("hierarchical", hosts), len(hosts)
    made = [
        torch.randn(50, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(r))
        for r in range(size)
    ]
    mean = made[dist.get_rank()].clone()
    reduce.mean(mean.T)  # with gaps between its numbers
    everywhere = [torch.empty(50, 7, dtype=torch.float64) for _ in range(size)]
    dist.all_gather(everywhere, mean.contiguous())
    assert all(torch.equal(everywhere[0], other) for other in everywhere)
    said = reduce.summary_lines[0]
    dist.barrier()
    return mean, torch.stack(made).mean(0), said


@pytest.mark.parametrize(
    ("name", "victim", "hosts"),
    [
        ("ring", 0, "AAAA"),
        ("tree", 2, "AAAA"),
        ("hierarchical", 1, "AABB"),
        ("hierarchical", 2, "AABB"),
    ],
)
def test_a_rank_that_dies_is_named_by_a_neighbour_and_all_others_fail(
    name: str, victim: int, hosts: str
) -> None:
    with world.start(4, _until_it_fails, name, victim, hosts, timeout_s=60.0) as running:
        codes = running.wait()
    assert codes == [3 if rank == victim else 0 for rank in range(4)], running.failures


def _until_it_fails(name: str, victim: int, hosts: str) -> None:
    reduce = _on_hosts(name, hosts)
    tensor = torch.ones(100_000)
    reduce.mean(tensor)
    if dist.get_rank() == victim:
        os._exit(3)
    with pytest.raises(RuntimeError, match=r"rank \d"):
        _again_and_again(reduce, tensor)
    os._exit(0)  # not all of the world can take leave


def _again_and_again(reduce: NamedMean, tensor: Tensor) -> None:
    for _ in range(100):
        reduce.mean(tensor)


def test_a_rank_that_does_not_come_is_named_after_the_time_out() -> None:
    assert world.run(2, _waits) == [True, True]


def _waits() -> bool:
    group = dist.new_group(backend=GLOO_BACKEND_NAME, timeout=timedelta(seconds=1))
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.wait(["the other has failed"])
        return True
    with pytest.raises(CollectiveFailed, match=r"rank 1 waited 1 s in recv\(.* for rank 0"):
        PairwiseLink(group).exchange(receive=(torch.ones(3), 0))
    store.set("the other has failed", "")
    return True
