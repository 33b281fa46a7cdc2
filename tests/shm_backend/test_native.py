"""Compiled steps: in one process in any order of turns, then in processes that die."""

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process_ranks import Program, Turns, drive, meet
from process_exit import wait_for_the_end
from torch import Tensor

from shoal.errors import CollectiveFailed
from shoal.shm_backend import collectives, native
from shoal.shm_backend.group import ShoalGroup
from shoal.shm_backend.native import CODES, NativeCalls
from shoal.shm_backend.phase_board import CallSignature, PhaseBoard, Steps
from shoal.testing import world

pytestmark = pytest.mark.skipif(
    not native.version(), reason="there was no compiler when Shoal was installed"
)
Lengths = st.integers(0, 3000)
KINDS = st.tuples(st.sampled_from(sorted(CODES, key=str)), st.integers(0, 3000))


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make slices small, so that slots are used again and two passes come soon."""
    monkeypatch.setattr(native, "SLICE_BYTES", 1 << 9)
    monkeypatch.setattr(native, "LARGE_BYTES", 1 << 13)
    monkeypatch.setattr(native, "LARGE_SLICE_BYTES", 1 << 11)
    monkeypatch.setattr(native, "ONE_PASS_BYTES", 1 << 12)
    monkeypatch.setattr(native, "SPIN_S", 0.0)


Reduce = Callable[[Tensor, str], Steps]


def compiled_of(ranks: Sequence[PhaseBoard]) -> list[Reduce]:
    """Return the compiled all-reduce of each rank."""
    return [partial(_compiled_all_reduce, NativeCalls(board)) for board in ranks]


@given(st.integers(2, 5), st.lists(st.tuples(st.integers(0, 4), Lengths), min_size=1), Turns)
@settings(max_examples=40)
def test_broadcasts_give_all_ranks_the_values_of_the_root(
    size: int, kinds: list[tuple[int, int]], turns: list[int]
) -> None:
    ranks = meet(size)
    steps = [NativeCalls(board) for board in ranks]
    programs: list[list[tuple[CallSignature, Callable[[], Steps]]]] = [[] for _ in ranks]
    results: list[list[Tensor]] = [[] for _ in kinds]
    for index, (number, length) in enumerate(kinds):
        root = number % size
        call = CallSignature("broadcast", torch.int32, length, root=root)
        for rank, program in enumerate(programs):
            own = torch.full((length,), 100 * index + rank, dtype=torch.int32)
            results[index].append(own)
            program.append((call, partial(steps[rank].broadcast, own, root)))
            values = torch.full((5,), float(rank), dtype=torch.float64)
            program.append(_all_reduce(compiled_of(ranks)[rank], values, "sum"))
    drive(ranks, programs, turns)
    for index, (number, _) in enumerate(kinds):
        expected = 100 * index + number % size
        assert all(bool((result == expected).all()) for result in results[index])


@given(st.integers(2, 4), st.data(), st.sampled_from([10, 2000]), Turns)
@settings(max_examples=20)
def test_a_rank_with_another_root_is_named_before_anything_is_copied(
    size: int, data: st.DataObject, length: int, turns: list[int]
) -> None:
    ranks, wrong = meet(size), data.draw(st.integers(0, size - 1))
    results = [torch.full((length,), float(rank)) for rank in range(size)]
    programs: list[Program] = []
    for rank, board in enumerate(ranks):
        root = 1 if rank == wrong else 0
        call = CallSignature("broadcast", torch.float32, length, root=root)
        programs.append([(call, partial(NativeCalls(board).broadcast, results[rank], root))])
    with pytest.raises(CollectiveFailed, match="root 1"):
        drive(ranks, programs, turns)
    assert all(bool((result == float(rank)).all()) for rank, result in enumerate(results))


def _compiled_all_reduce(steps: NativeCalls, tensor: Tensor, operation: str) -> Steps:
    return steps.all_reduce(tensor, CODES[tensor.dtype, operation])


@given(st.integers(2, 5), st.lists(KINDS, min_size=1, max_size=5), Turns)
@settings(max_examples=60)
def test_sums_are_those_of_python_bit_by_bit(
    size: int, kinds: list[tuple[tuple[torch.dtype, str], int]], turns: list[int]
) -> None:
    results = []
    for is_compiled in (True, False):
        ranks = meet(size)
        plain: list[Reduce] = [partial(collectives.all_reduce, board) for board in ranks]
        reduces = compiled_of(ranks) if is_compiled else plain
        torch.manual_seed(len(kinds))
        programs: list[list[tuple[CallSignature, Callable[[], Steps]]]] = [[] for _ in ranks]
        for (dtype, operation), length in kinds:
            for board, reduce, program in zip(ranks, reduces, programs, strict=True):
                own = torch.randn(length, dtype=dtype)
                results.append(own)
                program.append(_all_reduce(reduce, own, operation))
                program.append(_broadcast(board, length))  # whose phases come between
        drive(ranks, programs, turns)
    half = len(results) // 2
    assert all(
        torch.equal(ours, theirs)
        for ours, theirs in zip(results[:half], results[half:], strict=True)
    )


def _all_reduce(
    reduce: Reduce, tensor: Tensor, operation: str
) -> tuple[CallSignature, Callable[[], Steps]]:
    call = CallSignature("all_reduce", tensor.dtype, tensor.numel(), operation)
    return call, partial(reduce, tensor, operation)


def _broadcast(board: PhaseBoard, length: int) -> tuple[CallSignature, Callable[[], Steps]]:
    return CallSignature("broadcast", torch.int64, length), partial(
        collectives.broadcast, board, torch.ones(length), 0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nan_infinity_and_subnormal_values_are_summed_as_by_torch(
    dtype: torch.dtype,
) -> None:
    tiny = torch.finfo(dtype).tiny / 4
    first = torch.tensor([float("nan"), float("inf"), float("inf"), tiny, -0.0], dtype=dtype)
    second = torch.tensor([1.0, float("-inf"), 1.0, tiny, -0.0], dtype=dtype)
    ranks, results = meet(2), [first.clone(), second.clone()]
    reduces = compiled_of(ranks)
    drive(ranks, [[_all_reduce(*pair, "sum")] for pair in zip(reduces, results, strict=True)], [])
    for result in results:
        assert torch.equal(result.view(torch.int8), (first + second).view(torch.int8))


@given(st.integers(2, 4), st.data(), st.sampled_from([10, 2000]), Turns)
@settings(max_examples=30)
def test_a_rank_that_calls_something_else_is_named_and_nothing_is_summed(
    size: int, data: st.DataObject, length: int, turns: list[int]
) -> None:
    ranks, wrong = meet(size), data.draw(st.integers(0, size - 1))
    reduces = compiled_of(ranks)
    results = [torch.full((length,), float(rank)) for rank in range(size)]
    results[wrong] = torch.full((length - 1,), -1.0)
    programs: list[Program] = [
        [_all_reduce(*pair, "sum")] for pair in zip(reduces, results, strict=True)
    ]
    with pytest.raises(
        CollectiveFailed,
        match=rf"rank {wrong} calls all_reduce\({length - 1:,} x|{length - 1:,} x float32",
    ):
        drive(ranks, programs, turns)
    assert all(
        torch.equal(r, torch.full_like(r, float(rank)))
        for rank, r in enumerate(results)
        if rank != wrong
    )


def test_steps_of_another_source_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.version() == native.VERSION
    monkeypatch.setattr(native, "compiled", SimpleNamespace(VERSION=native.VERSION + 1))
    assert native.version() == 0


def test_invalid_arguments_of_compiled_steps_are_refused() -> None:
    steps = NativeCalls(meet(2)[0]).small
    with pytest.raises(ValueError, match="no all-reduce has 8 bytes at 64, code 6 and a step 0"):
        steps.advance(64, 8, 6, 0, 1, 0)  # 4 and 5 are broadcasts of either root
    with pytest.raises(ValueError, match="no all-reduce has 8 bytes at 0"):
        steps.advance(0, 8, 0, 0, 1, 0)
    with pytest.raises(TypeError, match="takes 6 numbers, not 1"):
        steps.advance(0)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="whole cache lines"):
        type(steps)(0, [1, 2], [1, 2], (0, 3, 8, 16, 8, 1 << 19, 5), (100, 1 << 17), 0, 0)


@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_that_all_have_them_use_them(ranks: int) -> None:
    assert world.run(ranks, _reduce, False) == [(True, True)] * ranks


def test_all_do_without_where_one_rank_has_none() -> None:
    assert world.run(3, _reduce, True) == [(False, True)] * 3


def _reduce(one_has_none: bool) -> tuple[bool, bool]:
    """Return whether steps were compiled, and whether sums are right."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if one_has_none and rank == 1:
        os.environ["SHOAL_COMPILED"] = "0"
    group = dist.new_group()
    assert isinstance(group, ShoalGroup)
    right = True
    for length in (0, 1, 1000, 100_000, 700_001):
        own = torch.arange(length, dtype=torch.float64) + rank
        dist.all_reduce(own, group=group)
        right &= torch.equal(
            own, size * torch.arange(length, dtype=torch.float64) + sum(range(size))
        )
    return group._native_calls is not None, right


@pytest.mark.parametrize(
    "seed", [seed if seed < 2 else pytest.param(seed, marks=pytest.mark.slow) for seed in range(60)]
)
def test_a_rank_that_dies_or_stops_between_two_compiled_steps_is_named(seed: int) -> None:
    chance = random.Random(seed)
    ranks, number = chance.randint(2, 4), chance.choice((signal.SIGKILL, signal.SIGSTOP))
    victim = chance.randrange(ranks)
    with world.start(ranks, _until_it_fails, victim, timeout_s=100.0) as running:
        time.sleep(0.5 + chance.random())
        os.kill(running.pids[victim], number)
        for rank in set(range(ranks)) - {victim}:
            wait_for_the_end(running.pids[rank], 100.0)
        running.kill(victim)
        codes = running.wait()
    assert [code for rank, code in enumerate(codes) if rank != victim] == [0] * (ranks - 1), (
        running.failures
    )


def _until_it_fails(victim: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=4))
    with pytest.raises(CollectiveFailed, match=rf"rank {victim} "):
        _reduce_for_ever(group)
    os._exit(0)  # not all of the world can take leave


def _reduce_for_ever(group: dist.ProcessGroup) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(10**9):
        own = torch.full(((3, 1000, 600_000)[step % 3],), float(rank + step % 1000))
        dist.all_reduce(own, group=group)
        if not (own == sum(range(size)) + size * (step % 1000)).all():
            os._exit(4)
