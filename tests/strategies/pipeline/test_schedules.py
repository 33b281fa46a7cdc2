"""Tables of actions: complete, free of deadlocks, as long as the papers say, and drawn as they
are run.
"""

import inspect

import pytest

from shoal.cli import main
from shoal.costs.pass_table import Action
from shoal.strategies.pipeline.schedule_timing import (
    bubble_fractions,
    expected_bubble,
    in_flight,
    render,
    timeline,
)
from shoal.strategies.pipeline.schedules import SCHEDULES, ScheduleTable, check, problems, table

SHAPES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 4, 5, 8, 16)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_table_that_is_not_refused_is_complete_and_ends(name: str) -> None:
    for ranks, microbatches in SHAPES:
        if not problems(name, ranks, microbatches):
            check(table(name, ranks, microbatches))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("microbatches", [1, 4, 8, 16])
def test_idle_time_is_what_the_paper_says(name: str, ranks: int, microbatches: int) -> None:
    fewest = {
        "naive": 1,
        "gpipe": 1,
        "1f1b": 1,
        "interleaved": ranks,
        "zero-bubble": ranks,
        "zbv": 2 * ranks - 1,
    }
    if problems(name, ranks, microbatches) or microbatches < fewest[name]:
        pytest.skip("no such table, or too few micro-batches for the formula")
    made = table(name, ranks, microbatches)
    _, expected = expected_bubble(name, ranks, microbatches, made.num_stages // ranks)
    assert bubble_fractions(timeline(made)) == pytest.approx([expected] * ranks)


def test_activations_in_flight_are_what_the_papers_say() -> None:
    assert in_flight(table("gpipe", 4, 8)) == [8, 8, 8, 8]
    assert in_flight(table("1f1b", 4, 8)) == [4, 3, 2, 1]
    assert in_flight(table("zero-bubble", 4, 8)) == [4, 4, 4, 4]
    assert in_flight(table("zbv", 4, 8)) == [8, 8, 8, 8]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_docstring_draws_the_table_that_is_run(name: str) -> None:
    made = table(name, 4, 1 if name == "naive" else 4)
    drawn = [
        line.strip()
        for line in inspect.cleandoc(SCHEDULES[name].make_rows.__doc__ or "").splitlines()
    ]
    assert [line for line in drawn if line.startswith("rank")] == render(made).splitlines()


def test_a_strategy_is_drawn_as_its_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    drawn = []
    for words in (
        ["interleaved", "-p", "2", "-m", "4", "-v", "2"],
        ["tensor=2,pipeline=2,schedule=interleaved,stages=2", "-m", "4"],
        ["pipeline=2,schedule=interleaved,microbatches=4"],
    ):
        with pytest.raises(SystemExit):
            main(["schedule", *words])
        drawn.append(capsys.readouterr().out)
    assert "rank 1" in drawn[0]
    assert drawn == [drawn[0]] * 3


def test_a_rank_of_the_v_holds_the_first_and_the_last_stage() -> None:
    assert table("zbv", 4, 8).stages_of(0) == [0, 7]
    assert table("interleaved", 4, 8).stages_of(0) == [0, 4]


def test_a_table_in_which_ranks_wait_for_each_other_is_found() -> None:
    backwards = (Action("B", 0, 0), Action("F", 0, 0))
    with pytest.raises(AssertionError, match="wait for each other"):
        check(ScheduleTable((backwards, (Action("F", 1, 0), Action("B", 1, 0))), "wrong", 2, 1))


def test_the_command_draws_in_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["schedule", "1f1b", "-p", "4", "-m", "8"])
    said = capsys.readouterr().out
    assert render(table("1f1b", 4, 8)) in said
    assert "(p-1)/(m+p-1) gives 27.3 %" in said
