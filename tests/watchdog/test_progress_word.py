"""Words that one process writes and another one reads."""

from __future__ import annotations

import os

from shoal.shm_backend.phase_board import CallSignature
from shoal.watchdog import progress_word
from shoal.watchdog.progress_word import FIRST, RECV, WAITS, Phase, ProgressMemory, group_id
from shoal.watchdog.progress_writer import ProgressWriter


def attached(memory: ProgressMemory, rank: int = 0) -> ProgressWriter:
    writer = ProgressWriter()
    assert memory.path is not None
    writer.attach(memory.path, rank, 60.0)
    return writer


def test_a_word_ends_before_the_steps() -> None:
    assert progress_word.WORD.size <= progress_word.RING_AT


def test_the_launcher_reads_what_each_rank_writes() -> None:
    memory = ProgressMemory(2)
    writer = attached(memory, 1)
    assert memory.read(0) is None
    calls = writer.join_group("world", [0, 1])
    writer.set_stage(1)
    calls.begin(3, CallSignature("all_reduce", length=1000, operation="sum").encoded)
    writer.begin_step(())
    found = memory.read(1)
    assert found is not None
    word, number = found.word, group_id("world", [0, 1])
    assert (word.phase, word.flags, word.call) == (Phase.FORWARD, FIRST, 3)
    assert (word.group, word.length) == (number, 1000)
    assert found.calls == {number: 3}
    assert found.groups[number] == [0, 1]
    assert found.stage == 1
    with writer.message_wait(RECV, 0, 10):
        found = memory.read(1)
        assert found is not None
        assert found.word.flags == FIRST | WAITS
        assert (found.word.kind, found.word.peer) == (RECV, 0)
    memory.close()


def test_steps_are_kept_with_their_waits_and_only_the_first_may_be_long() -> None:
    memory = ProgressMemory(1)
    writer = attached(memory)
    for step in range(40):
        writer.begin_step(())
        writer.add_waited(step)
        writer.end_step()
    found = memory.read(0)
    assert found is not None
    assert found.word.step == 40
    assert not found.word.flags & FIRST
    assert [times.step for times in found.steps] == list(range(9, 41))
    assert [times.waited_ns for times in found.steps] == list(range(8, 40))
    writer.begin_step("another shape")
    found = memory.read(0)
    assert found is not None
    assert found.word.flags & FIRST
    memory.close()


def test_a_forked_process_writes_nothing() -> None:
    memory = ProgressMemory(1)
    writer = attached(memory)
    os.register_at_fork(after_in_child=writer.detach)
    writer.enter(Phase.DATA)
    if (child := os.fork()) == 0:
        writer.enter(Phase.SAVE)
        os._exit(0)
    os.waitpid(child, 0)
    found = memory.read(0)
    assert found is not None
    assert found.word.phase == Phase.DATA
    memory.close()


def test_a_process_without_a_launcher_may_call_everything() -> None:
    writer = ProgressWriter()
    writer.join_group("world", [0]).begin(1, 1)
    writer.begin_step(())
    with writer.data(), writer.waiting():
        writer.touch()
    writer.end_step()
