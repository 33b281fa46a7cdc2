"""The simulator against times that were worked out by hand."""

from __future__ import annotations

import pytest

from shoal.costs.event_simulator import StepTask, simulate


def test_tasks_of_one_queue_run_one_after_the_other() -> None:
    timeline = simulate([StepTask("a", 2.0), StepTask("a", 3.0)])
    assert timeline.starts == (0.0, 2.0)
    assert timeline.ends == (2.0, 5.0)


def test_a_task_waits_for_those_of_other_queues() -> None:
    tasks = [StepTask("a", 2.0), StepTask("b", 1.0, after=(0,)), StepTask("a", 1.0, after=(1,))]
    assert simulate(tasks).ends == (2.0, 3.0, 4.0)


def test_two_transfers_share_a_link_in_equal_parts() -> None:
    # Both run from 1 to 5: the first has 3 s left at half speed up to 5 -> 1 s left, alone: 6.
    tasks = [
        StepTask("a", 4.0, links=("link",)),
        StepTask("b", 1.0),
        StepTask("b", 2.0, (1,), ("link",)),
    ]
    timeline = simulate(tasks)
    assert timeline.starts == (0.0, 0.0, 1.0)
    assert timeline.ends == pytest.approx((6.0, 1.0, 5.0), rel=1e-12)


def test_three_transfers_that_start_together_end_together() -> None:
    tasks = [StepTask(queue, 1.0, links=("link",)) for queue in "abc"]
    assert simulate(tasks).ends == pytest.approx((3.0, 3.0, 3.0), rel=1e-12)


def test_computing_is_slower_while_a_message_is_under_way() -> None:
    # 2 s of a message slow 4 s of computing by 1.25: 1.6 s are done after 2 s, 2.4 s are left.
    tasks = [StepTask("compute", 4.0), StepTask("messages", 2.0)]
    ends = simulate(tasks, {"compute": ("messages", 1.25)}).ends
    assert ends == pytest.approx((4.4, 2.0), rel=1e-12)


def test_tasks_without_work_take_no_time() -> None:
    assert simulate([StepTask("a", 0.0), StepTask("a", 0.0, after=(0,))]).length == 0.0
    assert simulate([]).length == 0.0


def test_a_pipeline_of_equal_stages_has_the_bubble_of_the_formula() -> None:
    # GPipe, forward only: m micro-batches through p stages take m + p - 1 passes.
    p, m = 3, 4
    tasks = [
        StepTask(f"rank {stage}", 1.0, (number * p + stage - 1,) if stage else ())
        for number in range(m)
        for stage in range(p)
    ]
    assert simulate(tasks).length == m + p - 1


def test_tasks_that_wait_in_a_circle_are_an_error() -> None:
    with pytest.raises(ValueError, match="2 tasks wait for each other"):
        simulate([StepTask("a", 1.0, (1,)), StepTask("b", 1.0, (0,))])
