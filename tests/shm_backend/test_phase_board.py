"""The collectives without processes: all ranks in one, driven in any order by hypothesis."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process_ranks import Turns, drive, meet
from torch import Tensor

from shoal.errors import CollectiveFailed
from shoal.platform.tensors import DTYPES
from shoal.shm_backend import collectives, phase_board
from shoal.shm_backend.phase_board import (
    OPERATIONS,
    SLOT_BYTES,
    CallSignature,
    PhaseBoard,
    Steps,
    decode,
)
from shoal.watchdog.progress_word import COLLECTIVES

SMALL_SLOT_BYTES = 1 << 10


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make slots small, so that many are filled."""
    monkeypatch.setattr(collectives, "SLOT_BYTES", SMALL_SLOT_BYTES)


@given(
    st.integers(2, 4),
    st.integers(0, 3000),
    st.sampled_from(("sum", "avg", "max", "product")),
    Turns,
)
@settings(max_examples=40)
def test_an_all_reduce_is_the_reduction_in_the_order_of_ranks(
    size: int, length: int, operation: str, turns: list[int]
) -> None:
    ranks, inputs = meet(size), [torch.randn(length) for _ in range(size)]
    expected = inputs[0].clone()
    for other in inputs[1:]:
        expected = {"max": torch.maximum, "product": torch.mul}.get(operation, torch.add)(
            expected, other
        )
    expected = expected / size if operation == "avg" else expected
    results = [tensor.clone() for tensor in inputs]
    call = CallSignature("all_reduce", torch.float32, length, operation)
    drive(
        ranks,
        [[(call, _all_reduce(e, r, operation))] for e, r in zip(ranks, results, strict=True)],
        turns,
    )
    for result in results:
        assert torch.equal(result, expected)


def _all_reduce(board: PhaseBoard, tensor: Tensor, operation: str) -> Callable[[], Steps]:
    return lambda: collectives.all_reduce(board, tensor, operation)


@pytest.mark.slow
@given(
    st.integers(2, 4),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 2000)), max_size=6),
    Turns,
    st.data(),
)
@settings(max_examples=60)
def test_calls_of_all_kinds_in_a_row_do_not_disturb_each_other(
    size: int, kinds: list[tuple[int, int]], turns: list[int], data: st.DataObject
) -> None:
    ranks = meet(size)
    programs: list[list[tuple[CallSignature, Callable[[], Steps]]]] = [[] for _ in ranks]
    checks = []
    for number, length in kinds:
        root = data.draw(st.integers(0, size - 1))
        made = [torch.randint(0, 100, (size, length)) for _ in ranks]
        for e, program in zip(ranks, programs, strict=True):
            call, start, check = _any_call(e, number, root, made)
            program.append((call, start))
            checks.append(check)
    drive(ranks, programs, turns)
    for check in checks:
        check()


def _any_call(
    e: PhaseBoard, number: int, root: int, made: list[Tensor]
) -> tuple[CallSignature, Callable[[], Steps], Any]:
    """Return one rank's call, and a check of its result. made[rank][row] are the inputs."""
    size, length = made[0].shape
    own, out, at = made[e.rank].clone(), torch.full((size, length), -1), e.rank
    kind = ("broadcast", "all_gather", "reduce_scatter")[number]
    starts: list[Callable[[], Steps]] = [
        lambda: collectives.broadcast(e, out[0].copy_(own[0]), root),
        lambda: collectives.all_gather(e, own[0], out.unbind()),
        lambda: collectives.reduce_scatter(e, out[0], own.unbind(), "sum"),
    ]
    expected = [
        lambda: torch.equal(out[0], made[root][0]),
        lambda: torch.equal(out, torch.stack([rows[0] for rows in made])),
        lambda: torch.equal(out[0], sum(rows[at] for rows in made)),
    ]

    def check() -> None:
        assert expected[number](), kind

    return (
        CallSignature(kind, torch.int64, length, root=root),
        starts[number],
        check,
    )


@given(st.integers(2, 4), st.integers(1, 2000), Turns)
@settings(max_examples=30)
def test_a_row_is_reduced_in_its_own_place(size: int, length: int, turns: list[int]) -> None:
    ranks, made = meet(size), [torch.randn(size, length) for _ in range(size)]
    expected = made[0].clone()
    for other in made[1:]:
        expected += other
    call = CallSignature("reduce_scatter", torch.float32, length, "sum")
    programs = [
        [
            (
                call,
                lambda e=e, own=own: collectives.reduce_scatter(
                    e, own[e.rank], own.unbind(), "sum"
                ),
            )
        ]
        for e, own in zip(ranks, made, strict=True)
    ]
    drive(ranks, programs, turns)
    for rank, own in enumerate(made):
        assert torch.equal(own[rank], expected[rank])


@given(st.integers(2, 4), st.data(), Turns)
@settings(max_examples=30)
def test_a_rank_that_calls_something_else_is_named_and_nothing_is_summed(
    size: int, data: st.DataObject, turns: list[int]
) -> None:
    ranks, wrong = meet(size), data.draw(st.integers(0, size - 1))
    results = [torch.full((500,), float(rank)) for rank in range(size)]
    results[wrong] = torch.full((499,), -1.0)
    programs = [
        [(CallSignature("all_reduce", r.dtype, len(r), "sum"), _all_reduce(e, r, "sum"))]
        for e, r in zip(ranks, results, strict=True)
    ]
    with pytest.raises(
        CollectiveFailed,
        match=rf"rank {wrong} calls all_reduce\(499 x float32, sum\)|499 x float32",
    ):
        drive(ranks, programs, turns)
    assert all(
        torch.equal(r, torch.full_like(r, float(rank)))
        for rank, r in enumerate(results)
        if rank != wrong
    )


@given(
    st.sampled_from(COLLECTIVES),
    st.sampled_from(DTYPES),
    st.integers(0, 2**38 - 1),
    st.sampled_from(OPERATIONS),
    st.integers(0, 1023),
)
def test_a_call_survives_its_way_through_a_word(
    kind: str, dtype: Any, length: int, operation: str, root: int
) -> None:
    call = CallSignature(kind, dtype, length, operation, root)
    assert decode(call.encoded) == call
    assert 0 <= call.encoded < 2**63


def test_the_calls_of_all_phases_ahead_fit_into_the_ring() -> None:
    assert phase_board.RING > phase_board.SLOTS + phase_board.LAG
    assert SLOT_BYTES % 4096 == 0
