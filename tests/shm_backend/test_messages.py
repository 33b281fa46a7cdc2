"""Messages between ranks: they arrive as sent, in any order and number, and errors name a rank."""

import random
import time
from collections.abc import Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.errors import CollectiveFailed
from shoal.testing import world

LENGTHS = (0, 1, 100, 70_000, 1_500_000)
TYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.uint8,
)
Message = tuple[int, int, int, int, int]  # sender, receiver, tag, length, seed


def messages(ranks: int) -> st.SearchStrategy[list[Message]]:
    """Messages in the order in which each sender sends them."""
    rank = st.integers(0, ranks - 1)
    lengths = st.sampled_from([*LENGTHS[:4], *LENGTHS])
    message = st.tuples(rank, rank, st.integers(0, 2), lengths, st.integers(0, 999))
    return st.lists(message.filter(lambda m: m[0] != m[1]), min_size=1, max_size=12)


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(plan=messages(3), seed=st.integers(0, 999))
def test_messages_in_any_order_arrive_as_they_were_sent(plan: list[Message], seed: int) -> None:
    assert all(world.run(3, _exchange, plan, seed))


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(plan=messages(4), seed=st.integers(0, 999))
def test_many_messages_in_any_order_arrive_as_they_were_sent(
    plan: list[Message], seed: int
) -> None:
    assert all(world.run(4, _exchange, plan, seed))


def _exchange(plan: Sequence[Message], seed: int) -> bool:
    """Post sends and receives in a random order on each rank, except those with one tag."""
    rank = dist.get_rank()
    waits: list[dist.Work | None] = []
    received: list[tuple[torch.Tensor, torch.Tensor]] = []
    for sender, receiver, tag, length, number in _shuffled(plan, random.Random(seed + rank)):
        sent = _content(length, number)
        if sender == rank:
            waits.append(dist.isend(sent, receiver, tag=tag))
        elif receiver == rank:
            received.append((torch.zeros_like(sent), sent))
            waits.append(dist.irecv(received[-1][0], sender, tag=tag))
    random.Random(seed).shuffle(waits)
    for work in waits:
        assert work is not None
        work.wait()
    dist.barrier()
    return all(torch.equal(into, sent) for into, sent in received)


def _shuffled(plan: Sequence[Message], chance: random.Random) -> list[Message]:
    """Shuffle messages, but keep the order of those with the same ends and tag."""
    places = list(range(len(plan)))
    chance.shuffle(places)
    rows: dict[tuple[int, int, int], list[Message]] = {}
    for message in plan:
        rows.setdefault(message[:3], []).append(message)
    return [rows[plan[place][:3]].pop(0) for place in places]


def _content(length: int, number: int) -> torch.Tensor:
    dtype, made = TYPES[number % len(TYPES)], torch.Generator().manual_seed(number)
    return torch.randint(0, 100, (length,), generator=made).to(dtype)


def test_all_types_and_empty_tensors_are_carried() -> None:
    assert world.run(2, _carry) == [True, True]


def _carry() -> bool:
    other = 1 - dist.get_rank()
    for dtype in (*TYPES, torch.float16, torch.int8, torch.float8_e4m3fn):
        sent, into = torch.arange(24).to(dtype), torch.zeros(24, dtype=dtype)
        work = dist.isend(sent, other)
        assert work is not None
        dist.recv(into, other)
        work.wait()
        assert torch.equal(into.view(torch.uint8), sent.view(torch.uint8))
    work = dist.isend(torch.zeros(0, 3), other)
    assert work is not None
    dist.recv(torch.zeros(0, 3), other)
    return work.wait()


def test_messages_move_while_their_ranks_are_in_a_collective() -> None:
    assert world.run(2, _beside_a_collective) == [True, True]


def _beside_a_collective() -> bool:
    rank, length = dist.get_rank(), 3_000_000
    if rank == 0:  # far more than a socket holds, and nobody waits for it
        work = dist.isend(torch.full((length,), 7.0), 1)
        dist.barrier()
        assert work is not None
        return work.wait()
    into = torch.zeros(length)
    dist.recv(into, 0)
    dist.barrier()
    return bool((into == 7).all())


def test_both_ranks_may_send_much_before_they_receive() -> None:
    assert world.run(2, _both_first) == [True, True]


def _both_first() -> bool:
    other, length = 1 - dist.get_rank(), 3_000_000
    into = torch.zeros(length)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.full((length,), float(other)), other),
            dist.P2POp(dist.irecv, into, other),
        ]
    )
    for work in works:
        work.wait()
    return bool((into == dist.get_rank()).all())


def test_who_sends_nothing_is_named_after_the_time_out() -> None:
    assert world.run(2, _silent) == [True, True]


def _silent() -> bool:
    group = dist.new_group(timeout=timedelta(seconds=1))
    if dist.get_rank():
        begin = time.monotonic()
        with pytest.raises(
            CollectiveFailed, match=r"rank 1 waited 1 s in recv\(2 x float32 from rank 0.* is alive"
        ):
            dist.recv(torch.zeros(2), 0, group)
        assert time.monotonic() - begin < 30
        with pytest.raises(CollectiveFailed, match="nothing passes between these ranks any more"):
            dist.send(torch.zeros(2), 0, group)
    dist.barrier()
    return True
