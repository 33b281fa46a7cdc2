"""Collectives that read tensors where they lie: all ranks in one process, in any order, and then in processes."""

import mmap
import resource
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from meeting_here import Program, Turns, drive, meet
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from shoal.comm.backend import collectives, direct
from shoal.comm.backend.bell import CALLERS, EVENTS, THREAD
from shoal.comm.backend.call import Call
from shoal.comm.backend.exchange import PLACES_AT, RING, RING_AT, WORDS_BYTES, Exchange
from shoal.comm.backend.group import ShoalGroup
from shoal.comm.backend.reduction import can_reduce
from shoal.comm.backend.room import NOWHERE, Room, Rooms, make_room
from shoal.comm.memory import Memory, attach
from shoal.errors import PeerLost
from shoal.proof import Experiment
from shoal.proof.zoo import image_loader
from shoal.testing import world
from shoal.testing.check_strategy import check_strategy

ROOM_BYTES = 1 << 20
TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.complex64)
OPERATIONS = ("sum", "avg", "product", "min", "max")
KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")


@pytest.fixture(autouse=True)
def however_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of any length are read where they lie, and in chunks so small that there are many."""
    monkeypatch.setattr(direct, "DIRECT_BYTES", 0)
    monkeypatch.setattr(direct, "CHUNK_BYTES", 1 << 10)


def meet_in_rooms(size: int) -> list[Exchange]:
    memories, exchanges = [Memory(ROOM_BYTES) for _ in range(size)], meet(size)
    for exchange in exchanges:
        others = {other: attach(memories[other].description) for other in range(size) if other != exchange.rank}
        own = Room(memories[exchange.rank], ROOM_BYTES)
        exchange.rooms = Rooms(own, {other: memory for other, memory in others.items() if memory is not None}, {})
    for memory in memories:
        memory.close()
    return exchanges


def somewhere(exchange: Exchange, numbers: Tensor, inside: bool, offset: int) -> Tensor:
    """The numbers in the rank's room, or not, as a part of something larger."""
    length = numbers.numel() + offset
    assert exchange.rooms is not None
    room = exchange.rooms.own.tensor(length, numbers.dtype) if inside else torch.empty(length, dtype=numbers.dtype)
    assert room is not None
    return room[offset:].copy_(numbers)


class Calling:
    """One rank's call of some kind; when it returns, its tensors are written over at once, after `result` was kept."""

    def __init__(self, exchange: Exchange, kind: str, operation: str, own: Tensor, in_place: bool, root: int) -> None:
        self.exchange, self.kind, self.operation, self.own, self.root = exchange, kind, operation, own, root
        self.rows = own.view(exchange.size, -1).unbind()
        self.out = self.rows[exchange.rank] if in_place else torch.empty_like(self.rows[0])
        gathers = kind == "all_gather"
        self.outs = self.rows if in_place else torch.empty_like(own).view(exchange.size, -1).unbind()
        self.result = torch.empty(0)
        length = own.numel() if kind in ("all_reduce", "broadcast") else self.out.numel()
        self.call = Call(kind, own.dtype, length, "" if gathers or kind == "broadcast" else operation, root)

    def steps(self, how: Any) -> collectives.Steps:
        exchange, own = self.exchange, self.own
        if self.kind == "all_reduce":
            yield from how.all_reduce(exchange, own, self.operation)
            self.result = own.clone()
        elif self.kind == "reduce_scatter":
            yield from how.reduce_scatter(exchange, self.out, self.rows, self.operation)
            self.result = self.out.clone()
        elif self.kind == "all_gather":
            yield from how.all_gather(exchange, self.rows[exchange.rank], self.outs)
            self.result = torch.cat(self.outs)
        else:
            yield from how.broadcast(exchange, own, self.root)
            self.result = own.clone()
        own.fill_(exchange.rank + 77)


@given(
    st.integers(2, 4),
    st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from(TYPES), st.sampled_from(OPERATIONS)), max_size=4),
    Turns,
    st.data(),
)
@settings(max_examples=60, deadline=None)
def test_wherever_tensors_lie_the_result_is_the_same_to_the_last_bit(
    size: int, kinds: Sequence[tuple[str, torch.dtype, str]], turns: list[int], data: st.DataObject
) -> None:
    found, expected = meet_in_rooms(size), meet(size)
    programs: list[list[Any]] = [[] for _ in range(size)]
    wanted: list[list[Any]] = [[] for _ in range(size)]
    for kind, dtype, operation in kinds:
        operation = operation if can_reduce(dtype, operation) else "sum"
        length, in_place = data.draw(st.integers(1, 700)), data.draw(st.booleans())
        root, inside = data.draw(st.integers(0, size - 1)), data.draw(st.sampled_from((0, 1, size)))
        for rank in range(size):
            numbers = (torch.randn(size * length) * 4).to(dtype)
            offset = data.draw(st.integers(0, 20))
            lies = inside == size or (inside == 1 and rank == root)
            own = somewhere(found[rank], numbers, lies, offset)
            programs[rank].append(Calling(found[rank], kind, operation, own, in_place, root))
            wanted[rank].append(Calling(expected[rank], kind, operation, numbers, in_place, root))
    drive(found, _program(programs, direct), turns)
    drive(expected, _program(wanted, collectives), [])
    for mine, theirs in zip(programs, wanted, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one.result.view(torch.uint8), other.result.view(torch.uint8)), (one.call, size)


def _program(callings: Sequence[Sequence[Calling]], how: Any) -> list[Program]:
    return [[(one.call, partial(one.steps, how)) for one in rank] for rank in callings]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inside", [(True, True, True), (True, False, True), (False, False, False)])
def test_slots_are_used_only_where_a_tensor_lies_elsewhere(kind: str, inside: Sequence[bool]) -> None:
    ranks = meet_in_rooms(3)
    owns = [somewhere(e, torch.ones(3 * 50), lies, 0) for e, lies in zip(ranks, inside, strict=True)]
    callings = [[Calling(e, kind, "sum", own, False, 1)] for e, own in zip(ranks, owns, strict=True)]
    drive(ranks, _program(callings, direct), [])
    slots = torch.cat([e.layout(torch.float32, 50).whole[slot][e.rank] for e in ranks for slot in range(8)])
    assert bool(slots.any()) == (not inside[1] if kind == "broadcast" else not all(inside))


def test_an_output_that_lies_in_what_others_read_is_written_when_they_have_read_it() -> None:
    ranks = meet_in_rooms(2)
    owns = [somewhere(e, torch.arange(100.0) + 1000 * e.rank, True, 0) for e in ranks]
    call = Call("reduce_scatter", torch.float32, 50, "sum")
    outs = [owns[0][50:], owns[1][:50]]  # where the other rank reads
    programs: list[Program] = [
        [(call, partial(direct.reduce_scatter, e, out, own.view(2, -1).unbind(), "sum"))]
        for e, out, own in zip(ranks, outs, owns, strict=True)
    ]
    expected = [1000 + 2 * torch.arange(50.0), 1000 + 2 * torch.arange(50.0, 100.0)]
    drive(ranks, programs, [0] * 20)
    assert all(torch.equal(out, one) for out, one in zip(outs, expected, strict=True))


def test_a_rank_that_was_given_up_while_it_read_takes_nothing() -> None:
    ranks = meet_in_rooms(2)
    owns = [somewhere(e, torch.ones(500), True, 0) for e in ranks]
    lives = []
    for e, own in zip(ranks, owns, strict=True):
        e.begin(call := Call("all_reduce", torch.float32, 500, "sum"), call.word)
        lives.append(direct.all_reduce(e, own, "sum"))
    for _ in range(2):  # both have said where they are, and have summed
        for life in lives:
            next(life)
    next(lives[0])  # rank 0 has read; rank 1 is stopped
    ranks[0].fail("waited too long")
    owns[0].fill_(-1)
    with pytest.raises(PeerLost, match=r"rank 0 gave up in all_reduce\(500 x float32, sum\): waited too long"):
        next(lives[1])


@given(st.lists(st.one_of(st.integers(1, 40_000), st.integers(-5, -1)), max_size=60))
@settings(deadline=None)
def test_a_room_gives_each_tensor_a_place_of_its_own_and_takes_it_back(wishes: list[int]) -> None:
    room, held, made = Room(Memory(ROOM_BYTES), ROOM_BYTES), [], None
    for number, wish in enumerate(wishes):
        if wish > 0 and (made := room.tensor(wish, torch.int32)) is not None:
            held.append((number, made.fill_(number)))
        elif wish < 0 and held:
            del held[wish % len(held)]
        assert all((tensor == number).all() for number, tensor in held)
    del held, made
    all_of_it = room.tensor(ROOM_BYTES - mmap.PAGESIZE, torch.uint8)  # the first page is a table
    assert all_of_it is not None
    assert room.tensor(1, torch.uint8) is None


def test_a_part_of_a_tensor_keeps_its_place() -> None:
    room = Room(Memory(ROOM_BYTES), ROOM_BYTES)
    part = room.tensor(1000, torch.float32)
    assert part is not None
    part = part[10:20].view(2, 5).t().view(torch.int32)
    other = room.tensor(1000, torch.float32)
    assert other is not None
    assert room.place(other) != room.place(part) != NOWHERE
    assert room.place(torch.ones(3)) == NOWHERE


def test_a_process_that_is_forked_does_not_have_the_room() -> None:
    memory = Memory(ROOM_BYTES)
    memory.keep_from_children()
    assert "dc" in _flags_at(memory.head_address(0))


def _flags_at(address: int) -> list[str]:
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(maxsplit=1)[0]
        if "-" in head and not head.endswith(":"):
            begin, end = (int(number, 16) for number in head.split("-"))
            inside = begin <= address < end
        elif inside and head == "VmFlags:":
            return line.split()[1:]
    return []


def test_places_share_no_word_with_calls_or_with_the_bell() -> None:
    places = set(range(PLACES_AT, PLACES_AT + RING))
    assert places.isdisjoint({*range(RING_AT + RING), CALLERS, THREAD, EVENTS})
    assert max(places) < WORDS_BYTES // 8


# --- in processes


def test_fully_shard_finds_its_buffers_in_the_room() -> None:
    assert world.run(2, _train_sharded) == [True, True]


def _train_sharded() -> bool:
    mesh, group = dist.init_device_mesh("cpu", (2,)), dist.group.WORLD
    assert isinstance(group, ShoalGroup)
    found = []
    for enable in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(700, 900), nn.Tanh(), nn.Linear(900, 10))
        assert isinstance(fully_shard(model, mesh=mesh), FSDPModule)
        model.set_allocate_memory_from_process_group_for_comm(enable)  # type: ignore[operator]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        group._exchange.phase_before = group._exchange.phase  # type: ignore[attr-defined]
        for step in range(3):
            made = torch.Generator().manual_seed(10 * step + dist.get_rank())
            optimizer.zero_grad()
            model(torch.randn(4, 700, generator=made)).square().mean().backward()
            optimizer.step()
        phases = group._exchange.phase - group._exchange.phase_before  # type: ignore[attr-defined]
        found.append((phases, [p.to_local().clone() for p in model.parameters()]))  # type: ignore[attr-defined]
    (copied, theirs), (read, ours) = found
    return read < copied and all(torch.equal(*pair) for pair in zip(theirs, ours, strict=True))


class Wide(nn.Module):
    """So wide that its units are read where they lie."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 700), nn.Tanh(), nn.Linear(700, 500), nn.Linear(500, 10)
        )

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layers(x)
        return scores


@pytest.mark.parametrize("strategy", ["zero3", pytest.param("zero2", marks=pytest.mark.slow)])
def test_training_in_rooms_is_training(strategy: str) -> None:
    check_strategy(strategy, 2, Experiment(Wide, image_loader, nn.functional.cross_entropy, steps=3))


def test_places_that_were_let_go_of_are_used_again() -> None:
    room, held, last = Room(Memory(ROOM_BYTES), ROOM_BYTES), [], 0
    for _ in range(20):
        held = [*held[-1:], room.tensor(10_000, torch.float32)]
        assert held[-1] is not None
        last = max(last, room.place(held[-1]))
    assert last < 4 * 40_960


def test_no_room_where_addresses_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_room(2) is not None
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 40, 1 << 40))
    assert make_room(2) is None
