"""What shards note is enough to do everything again, whatever the schedule was; what it lacks
is said.
"""

import json
from collections.abc import Iterable
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.errors import RecordError, UsageError
from shoal.parameter_server.events import Outgoing, PullResponse, StepRequest
from shoal.parameter_server.node.event_log import PIECE_EVENTS, Event, EventLog
from shoal.parameter_server.node.partition_state import PartitionState
from shoal.parameter_server.node.shard import Shard
from shoal.parameter_server.optimizer_spec import OptimizerSpec, Settings, recipe_of
from shoal.parameter_server.partitioning import ParamMeta, partition
from shoal.parameter_server.recorded_order import RecordedOrder, ReplayClient, ReplayStep
from shoal.parameter_server.worker.flat_params import FlatParams

WORKERS, STEPS = 3, 4
PARTS = partition({name: ParamMeta(4, torch.float64, 0) for name in "abc"}, part_bytes=32)
PLAIN: Settings = {
    "lr": 0.1,
    "momentum": 0.9,
    "dampening": 0.0,
    "nesterov": False,
    "weight_decay": 0.0,
}
RECIPE = OptimizerSpec(torch.optim.SGD, [PLAIN])
START = [torch.linspace(-1, 1, part.length, dtype=part.dtype) for part in PARTS]


class Worker:
    """Its gradient of each part is a function of the values of all parts, of itself and of the
    step.
    """

    def __init__(self, number: int) -> None:
        self.number, self.step = number, 0
        self.values = [values.clone() for values in START]
        self.to_do: list[int] = []
        self.waits: set[int] = set()

    def stepped(self) -> ReplayStep:
        total = sum(float(values.sum()) for values in self.values)
        gradients = {
            part.number: (
                torch.sin(self.values[part.number] * total + self.number + self.step),
                b"\1",
            )
            for part in PARTS
        }
        self.step += 1
        return ReplayStep(
            gradients, StepRequest([{**PLAIN, "lr": 0.1 / self.step}], 0.5 + self.number)
        )


class Fleet:
    """Two shards, between which parts move, and workers of any speed."""

    def __init__(self, seed: int, staleness: int | None) -> None:
        self.chance = Random(seed)
        self.shards = [
            Shard(PARTS, RECIPE, range(WORKERS), staleness, owned=mine) for mine in ({0, 1}, {2})
        ]
        for part, values in zip(PARTS, START, strict=True):
            self.owner(part.number).load(0, part.number, values, [{}], 0)
        for shard in self.shards:
            shard.record()
        self.workers = [Worker(number) for number in range(WORKERS)]
        self.pushing: dict[int, ReplayStep] = {}
        self.moves = 0

    def owner(self, part: int) -> Shard:
        return next(shard for shard in self.shards if part in shard.owned)

    def run(self) -> list[Tensor]:
        """All steps in some order; the values in the end."""
        while ready := [
            w for w in self.workers if not w.waits and (w.step < STEPS or w.number in self.pushing)
        ]:
            worker = self.chance.choice(ready)
            if worker.number not in self.pushing:
                self.pushing[worker.number] = worker.stepped()
                worker.to_do = self.chance.sample(range(len(PARTS)), len(PARTS))
            elif worker.to_do:
                part = worker.to_do.pop()
                gradient, present = self.pushing[worker.number].gradients[part]
                self.deliver(
                    self.owner(part).push(
                        worker.number, worker.step - 1, part, gradient.clone(), present
                    )
                )
            else:
                order = self.pushing.pop(worker.number).order
                worker.waits = set(range(len(PARTS)))
                for shard in self.shards:
                    self.deliver(shard.request_step(worker.number, worker.step - 1, order))
            if self.chance.random() < 0.1:
                self.move(self.chance.randrange(len(PARTS)))
        return [self.owner(part.number).held[part.number].values for part in PARTS]

    def deliver(self, out: Iterable[Outgoing]) -> None:
        for value in out:
            assert isinstance(value, PullResponse)
            self.workers[value.worker].values[value.part].copy_(value.values)
            self.workers[value.worker].waits.discard(value.part)

    def move(self, part: int) -> None:
        """To the other shard, with what was said of it and has no answer."""
        giver = self.owner(part)
        taker = next(shard for shard in self.shards if shard is not giver)
        if (
            any(w.number in self.pushing and part not in w.to_do for w in self.workers)
            or giver.readers[part]
        ):
            return  # what links then say again is their business
        giver.set_ownership(giver.owned, {part}, {})
        given = giver.export_partition(part)
        assert given is not None
        taker.set_ownership(taker.owned, set(), {part: 1})
        taker.import_partition(given, 1, 0)
        giver.set_ownership(giver.owned - {part}, set(), {})
        taker.set_ownership(taker.owned | {part}, set(), {})
        self.moves += 1

    def events(self) -> list[Event]:
        found = [
            event for shard in self.shards if shard.history for event in shard.history.chunk(0)[1]
        ]
        return [Event(*event) for event in json.loads(json.dumps(found))]


def again(course: RecordedOrder) -> list[Tensor]:
    workers = [Worker(number) for number in range(WORKERS)]
    held = [PartitionState(part, RECIPE) for part in PARTS]
    for each, values in zip(held, START, strict=True):
        each.load(values, [{}], 0)

    def step(worker: int, number: int) -> ReplayStep:
        assert workers[worker].step == number
        return workers[worker].stepped()

    course.replay(
        held, lambda worker, part, values: workers[worker].values[part].copy_(values), step
    )
    return [each.values for each in held]


def recorded(seed: int = 1, staleness: int | None = None) -> list[Event]:
    fleet = Fleet(seed, staleness)
    fleet.run()
    return fleet.events()


def course(events: list[Event]) -> RecordedOrder:
    return RecordedOrder(events, len(PARTS), WORKERS, STEPS)


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32), staleness=st.sampled_from([1, 2, None]))
def test_any_schedule_is_done_again_to_the_same_bits(seed: int, staleness: int | None) -> None:
    fleet = Fleet(seed, staleness)
    values = fleet.run()
    events = fleet.events()
    fleet.chance.shuffle(events)  # shards are asked in any order
    for found, expected in zip(again(course(events)), values, strict=True):
        assert torch.equal(found, expected)


def test_parts_move_in_these_schedules() -> None:
    fleets = [Fleet(seed, None) for seed in range(10)]
    for fleet in fleets:
        fleet.run()
    assert sum(fleet.moves for fleet in fleets) > 5


@pytest.mark.slow
@settings(max_examples=100)
@given(seed=st.integers(0, 2**32), which=st.integers(0, 2**32))
def test_a_note_that_is_lost_is_missed(seed: int, which: int) -> None:
    events = recorded(seed)
    needed = [event for event in events if event.step < STEPS]
    with pytest.raises(RecordError):
        course([event for event in events if event is not needed[which % len(needed)]])


def test_a_worker_cannot_have_read_before_its_last_push_or_after_its_next() -> None:
    events = recorded()
    clocks = {(e.part, e.worker, e.step): e.clock for e in events if e.kind == "a"}
    reads = [index for index, e in enumerate(events) if e.kind == "r" and e.step < STEPS]
    assert len(reads) == len(PARTS) * WORKERS * (STEPS - 1)
    for index in reads:
        part, worker, step = events[index].part, events[index].worker, events[index].step
        for wrong in (clocks[part, worker, step - 1], clocks[part, worker, step] + 1):
            changed = [*events[:index], events[index]._replace(clock=wrong), *events[index + 1 :]]
            with pytest.raises(RecordError, match="that it did not have then"):
                course(changed)


def test_a_gap_is_named_by_part_and_update() -> None:
    events = [
        event
        for event in recorded()
        if not (event.kind == "a" and event.part == 1 and event.clock == 5)
    ]
    with pytest.raises(RecordError, match="update 5 of part 1"):
        course(events)


def test_two_answers_of_different_values_to_one_push_are_a_doubt_and_no_guess() -> None:
    events = recorded()
    read = next(event for event in events if event.kind == "r" and event.step == 2)
    with pytest.raises(RecordError, match=f"{read.clock} or {read.clock + 1}.*newer values"):
        course([*events, read._replace(clock=read.clock + 1)])


def test_what_is_pulled_replaces_what_was_read() -> None:
    events = recorded()
    read = next(event for event in events if event.kind == "r" and event.step == 2)
    found = course([*events, read._replace(kind="p")])
    assert found.read[read.worker, 2][read.part] == read.clock
    assert found.agreed == {2}


def test_two_pushes_cannot_be_the_same_update() -> None:
    events = recorded()
    applied = next(event for event in events if event.kind == "a")
    with pytest.raises(RecordError, match="does not say what was update"):
        course([*events, applied._replace(worker=(applied.worker + 1) % WORKERS)])


def test_workers_cannot_wait_for_each_other() -> None:
    """Each would have begun its first step with what the other one's first push had made."""
    events = [
        Event("a", part, clock, worker, 0)
        for part in (0, 1)
        for clock, worker in enumerate((part, 1 - part))
    ]
    events += [Event("p", 0, 1, 1, 0), Event("p", 1, 1, 0, 0)]
    held = [PartitionState(part, RECIPE) for part in PARTS[:2]]
    with pytest.raises(RecordError, match="contradicts itself"):
        RecordedOrder(events, 2, 2, 1).replay(
            held, lambda *_: None, lambda worker, _: Worker(worker).stepped()
        )


def test_notes_are_kept_until_they_are_known_to_have_arrived() -> None:
    history = EventLog()
    events = [Event("a", 0, clock, 0, clock) for clock in range(PIECE_EVENTS + 2)]
    for event in events:
        history.add(event)
    assert history.chunk(0) == (0, events[:PIECE_EVENTS], True)
    assert history.chunk(0) == (0, events[:PIECE_EVENTS], True)
    assert history.chunk(PIECE_EVENTS) == (PIECE_EVENTS, events[PIECE_EVENTS:], False)
    assert history.chunk(PIECE_EVENTS + 2) == (PIECE_EVENTS + 2, [], False)


def replayed(held: list[PartitionState]) -> ReplayClient:
    """A client of one part, whose values are ones."""
    parameter = nn.Parameter(torch.ones(4))
    flat = FlatParams({"weight": parameter}, partition({"weight": ParamMeta(4, torch.float32, 0)}))
    recipe = recipe_of(torch.optim.SGD([parameter], lr=0.5, momentum=0.9))
    return ReplayClient(flat, recipe, held, None)


def test_a_step_shows_what_was_pushed_and_needs_no_answer() -> None:
    client = replayed([])
    gradient = torch.arange(4.0)
    client.push(0, gradient, b"\1")
    client.request_step(StepRequest([{"lr": 0.1}], 0.3))
    client.wait([0])
    stepped = client.stepped()
    assert stepped.gradients[0] == (gradient, b"\1")
    assert stepped.order == StepRequest([{"lr": 0.1}], 0.3)
    with pytest.raises(UsageError, match="pushed nothing, or not everything"):
        client.stepped()
