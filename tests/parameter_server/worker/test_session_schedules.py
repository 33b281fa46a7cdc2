"""A worker's session under thousands of schedules, with real shards and a coordinator around it.

Messages wait on connections that are cut, answers come twice, servers die or stand still, and
partitions move: every push is applied once, every answer arrives, every value is of its step.
"""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from session_parts import STEPS, WORKERS, expected
from session_world import World

SCHEDULES = {"seed": st.integers(0, 2**32), "staleness": st.sampled_from([0, 0, 1, None])}


@settings(max_examples=40, deadline=None)
@given(**SCHEDULES)
@example(seed=255, staleness=0)  # a move that began and was called off while nobody looked
@example(seed=102569, staleness=1)  # a backup answers late for a partition that left and came back
def test_every_schedule_applies_each_push_once_and_loses_no_answer(
    seed: int, staleness: int | None
) -> None:
    assert_applies_each_push_once(seed, staleness)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(**SCHEDULES)
def test_a_thousand_schedules_apply_each_push_once(seed: int, staleness: int | None) -> None:
    assert_applies_each_push_once(seed, staleness)


def assert_applies_each_push_once(seed: int, staleness: int | None) -> None:
    world = World(Random(seed), staleness)
    for _ in range(60_000):
        if all(worker.is_done for worker in world.workers):
            break
        world.act()
    assert all(worker.is_done for worker in world.workers), "it has come to a stand"
    for part, owner in enumerate(world.coordinator.placement.owners):
        held = world.primary(owner).shard
        assert held.done[part] == dict.fromkeys(range(WORKERS), STEPS)
        assert torch.equal(held.held[part].values, expected(STEPS, part))
        for worker in world.workers:
            world.check_values(worker, part)
