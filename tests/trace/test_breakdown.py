"""Where steps went, of spans made by hand: every answer is known."""

from shoal.trace.breakdown import COMPONENTS, StepBreakdown, compute_breakdown
from shoal.trace.recorder import (
    ASIDE,
    BACKWARD,
    BLOCKED,
    DATA,
    EXCHANGE,
    FORWARD,
    OPTIMIZER,
    STEP,
    Span,
)

S = 1_000_000_000


def exchange(
    start: int, end: int, waits_for: tuple[int, ...], number: int = 0, name: str = "all_reduce"
) -> Span:
    return Span(EXCHANGE, name, start * S, end * S, 100, "world", number, waits_for)


def a_step(end: int = 20) -> list[Span]:
    """data 0-2, forward 2-6, backward 6-15, optimizer 15-18 and nothing known until the end."""
    times = {DATA: (0, 2), FORWARD: (2, 6), BACKWARD: (6, 15), OPTIMIZER: (15, 18), STEP: (0, end)}
    return [Span(kind, kind, a * S, b * S) for kind, (a, b) in times.items()]


def parts(shares: StepBreakdown) -> dict[str, float]:
    assert tuple(shares.parts_s) == COMPONENTS
    return {part: time_s for part, time_s in shares.parts_s.items() if time_s}


def test_a_rank_alone_computes_fetches_steps_and_does_something_else() -> None:
    found = compute_breakdown({0: a_step()})
    assert parts(found.shares[0]) == {"compute": 13.0, "data": 2.0, "optimizer": 3.0, "other": 2.0}
    assert found.slowest is None
    assert found.steps == 1


def test_what_hides_behind_computing_is_no_part_of_the_step() -> None:
    both = {rank: [*a_step(), exchange(8, 12, (1 - rank,))] for rank in (0, 1)}
    shares = compute_breakdown(both).shares[0]
    assert parts(shares)["compute"] == 13.0
    assert shares.hidden_s == 4.0
    assert shares.sent_bytes == 100


def test_blocked_time_is_waiting_until_the_last_has_come_and_communication_from_then_on() -> None:
    spans = {
        0: [
            *a_step(),
            exchange(8, 14, (1,)),
            Span(BLOCKED, "all_reduce", 9 * S, 14 * S, 0, "world", 0),
        ],
        1: [
            *a_step(),
            exchange(12, 14, (0,)),
            Span(BLOCKED, "all_reduce", 12 * S, 14 * S, 0, "world", 0),
        ],
    }
    found = compute_breakdown(spans)
    assert parts(found.shares[0]) == {
        **{"compute": 8.0, "waiting": 3.0, "communication": 2.0},
        **{"data": 2.0, "optimizer": 3.0, "other": 2.0},
    }
    assert parts(found.shares[1])["communication"] == 2.0
    assert "waiting" not in parts(found.shares[1])
    assert found.shares[0].hidden_s == 1.0
    assert found.shares[1].blamed_s == 3.0
    assert found.slowest is not None
    assert (found.slowest.rank, found.slowest.waited_s) == (1, 3.0)
    assert (found.slowest.part, found.slowest.more_s) == ("compute", 3.0)


def test_what_is_left_after_the_last_gradient_is_blocked_only_while_something_is_under_way() -> (
    None
):
    mine = [*a_step(), exchange(10, 13, (1,)), Span(BLOCKED, "last gradients", 11 * S, 15 * S)]
    found = compute_breakdown({0: mine, 1: [*a_step(), exchange(12, 13, (0,))]})
    assert parts(found.shares[0])["waiting"] == 1.0
    assert parts(found.shares[0])["communication"] == 1.0
    assert parts(found.shares[0])["compute"] == 11.0


def test_a_message_waits_for_its_sender_and_nobody_waits_for_a_receiver() -> None:
    sent = Span(EXCHANGE, "send to 1 F0", 9 * S, 10 * S, 8, "7: 0 > 1, tag 0", 0, ())
    received = Span(EXCHANGE, "recv from 0 F0", 6 * S, 10 * S, 8, "7: 0 > 1, tag 0", 0, (0,))
    blocked = Span(BLOCKED, received.name, 6 * S, 10 * S, 0, received.collective_id, 0)
    found = compute_breakdown({0: [*a_step(), sent], 1: [*a_step(), received, blocked]})
    assert parts(found.shares[1])["waiting"] == 3.0
    assert parts(found.shares[1])["communication"] == 1.0
    assert "waiting" not in parts(found.shares[0])


def test_nobody_waits_for_a_rank_that_was_not_seen_or_that_made_another_call() -> None:
    blocked = Span(BLOCKED, "all_reduce", 8 * S, 12 * S, 0, "world", 0)
    for others in (
        [],
        [exchange(11, 12, (0,), name="broadcast")],
        [exchange(11, 12, (0,), number=1)],
    ):
        found = compute_breakdown(
            {0: [*a_step(), exchange(8, 12, (1,)), blocked], 1: [*a_step(), *others]}
        )
        assert parts(found.shares[0])["communication"] == 4.0


def test_no_moment_counts_twice_however_many_exchanges_stand_still() -> None:
    guessed = Span(BLOCKED, "last gradients", 9 * S, 15 * S)
    mine = [*a_step(), exchange(8, 15, (1, 2)), exchange(8, 15, (1, 2), 1), guessed]
    spans = {
        0: mine,
        1: [*a_step(), exchange(11, 15, (0, 2)), exchange(12, 15, (0, 2), 1)],
        2: [*a_step(), exchange(9, 15, (0, 1)), exchange(14, 15, (0, 1), 1)],
    }
    found = compute_breakdown(spans)
    assert parts(found.shares[0])["waiting"] == 5.0
    assert found.shares[1].blamed_s + found.shares[2].blamed_s == 5.0
    assert found.slowest is not None
    assert found.slowest.rank == 2 if found.shares[2].blamed_s > found.shares[1].blamed_s else 1


def test_an_evaluation_between_two_steps_is_other_time_whatever_it_sends() -> None:
    aside = [Span(ASIDE, "evaluating", 18 * S, 25 * S), exchange(20, 22, (1,))]
    blocked = Span(BLOCKED, "all_reduce", 20 * S, 22 * S, 0, "world", 0)
    found = compute_breakdown(
        {0: [*a_step(25), *aside, blocked], 1: [*a_step(25), exchange(21, 22, (0,))]}
    )
    assert parts(found.shares[0]) == {"compute": 13.0, "data": 2.0, "optimizer": 3.0, "other": 7.0}


def test_figures_are_means_over_steps() -> None:
    second = [span.moved(20 * S) for span in a_step() if span.kind != DATA]
    found = compute_breakdown({0: [*a_step(), *second]})
    assert found.steps == 2
    assert parts(found.shares[0]) == {"compute": 13.0, "data": 1.0, "optimizer": 3.0, "other": 3.0}
