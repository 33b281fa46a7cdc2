"""A worker's session answers each event with the actions that it asks of its network."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from session_parts import HERE, gradient

from shoal.errors import ServerLost
from shoal.parameter_server.codec import Op
from shoal.parameter_server.coordinator.coordinator import Move, Placement, View
from shoal.parameter_server.worker.session import (
    AnswerMessage,
    ConnectShard,
    DisconnectShard,
    PushMessage,
    QueryAnswered,
    RequestMessage,
    SessionAction,
    ShardFailed,
    ShardMessage,
    ToShard,
    ValuesArrived,
    ValuesMessage,
    WorkerSession,
)


def session_of(placement: Placement, *connected: int) -> WorkerSession:
    """A session that is connected to these shards, each of which has a server of its number."""
    session = WorkerSession(len(placement.owners))
    session.placement_changed(placement)
    for shard in connected:
        view = View(shard, epoch=1, primary=shard, addresses={shard: HERE})
        assert session.connected(view) == []
    return session


def pushes(actions: Sequence[SessionAction]) -> list[tuple[int, int]]:
    """The shard and the partition of each push."""
    return [
        (action.shard, action.message.partition)
        for action in actions
        if isinstance(action, ToShard) and isinstance(action.message, PushMessage)
    ]


def pushed(session: WorkerSession, partition: int) -> list[tuple[int, int]]:
    return pushes(session.push(partition, gradient(0, 0, partition), b"\1"))


def test_every_shard_that_is_new_is_to_be_connected_once():
    session = WorkerSession(2)
    moving = Placement(1, (1, 1), {0: Move(2, 1)})
    assert session.placement_changed(moving) == [ConnectShard(shard) for shard in (0, 1, 2)]
    assert session.placement_changed(Placement(2, (2, 1))) == []
    assert session.placement_changed(Placement(2, (3, 3))) == []  # it is no newer


def test_a_push_waits_for_the_end_of_a_move_and_then_goes_to_the_new_owner():
    session = session_of(Placement(1, (0, 1)), 0, 1)
    assert pushed(session, 1) == [(1, 1)]
    assert session.placement_changed(Placement(2, (0, 1), {0: Move(1, 2)})) == []
    assert pushed(session, 0) == []
    assert session.resend(0, Op.PUSH) == []
    assert pushes(session.placement_changed(Placement(3, (1, 1)))) == [(1, 0)]


def test_a_move_that_is_called_off_sends_what_has_waited_to_the_old_owner():
    session = session_of(Placement(1, (0, 1), {0: Move(1, 1)}), 0, 1)
    pushed(session, 0)
    assert pushes(session.placement_changed(Placement(2, (0, 1)))) == [(0, 0)]


def test_what_an_owner_may_have_forgotten_in_a_move_that_was_missed_is_sent_again():
    session = session_of(Placement(1, (0, 1)), 0, 1)
    pushed(session, 0)
    assert session.placement_changed(Placement(2, (0, 1))) == []
    assert pushes(session.placement_changed(Placement(4, (0, 1)))) == [(0, 0)]


def test_a_new_owner_is_sent_nothing_while_the_old_one_still_writes_the_values():
    session = session_of(Placement(1, (0, 1)), 0, 1)
    pushed(session, 0)
    session.request_step(b"")
    values = ValuesMessage(0, clock=1, oldest=1)
    assert session.accept(0, values)
    assert session.placement_changed(Placement(2, (1, 1))) == []
    assert not session.accept(1, values)  # one that was on its way from an earlier stay there
    assert session.receive(1, values) == []
    assert pushes(session.receive(0, values)) == [(1, 0)]
    assert session.missing([0]) == [0]
    assert session.accept(1, values)
    assert session.receive(1, values) == [ValuesArrived(0, 1)]
    assert session.missing([0]) == []


def test_a_new_owner_is_sent_what_has_waited_when_the_old_ones_connection_is_lost():
    session = session_of(Placement(1, (0, 1)), 0, 1)
    pushed(session, 0)
    session.request_step(b"")
    assert session.accept(0, ValuesMessage(0, clock=1, oldest=1))
    assert session.placement_changed(Placement(2, (1, 1))) == []
    assert pushes(session.disconnected(0)) == [(1, 0)]


def test_values_that_were_not_written_count_neither_when_their_shard_is_the_owner_by_then():
    session = session_of(Placement(1, (0, 1)), 0, 1)
    session.request_step(b"")
    values = ValuesMessage(0, clock=1, oldest=1)
    assert not session.accept(1, values)
    session.placement_changed(Placement(2, (1, 1)))
    assert session.receive(1, values) == []
    assert session.missing([0]) == [0]


def test_a_lost_connection_is_made_up_for_by_everything_without_an_answer():
    session = session_of(Placement(1, (0, 0, 1)), 0, 1)
    session.record()
    for number in range(3):
        pushed(session, number)
    session.request_step(b"step")
    first = ValuesMessage(0, clock=1, oldest=1)
    session.accept(0, first)
    session.receive(0, first)
    session.query(Op.STATE, {1: b""})
    session.query_shard(0, Op.STATS)
    session.disconnected(0)
    assert session.query(Op.GRADIENT, {1: b""}) == []
    successor = View(0, epoch=2, primary=7, addresses={7: HERE})
    messages = [
        action.message for action in session.connected(successor) if isinstance(action, ToShard)
    ]
    assert messages[0] == RequestMessage(Op.RECORD)
    assert isinstance(messages[1], PushMessage)
    assert messages[1].partition == 1
    assert messages[2:] == [
        RequestMessage(Op.STATE, 1, 1, b""),
        RequestMessage(Op.GRADIENT, 1, 1, b""),
        RequestMessage(Op.STEP, 0, 0, b"step"),
        RequestMessage(Op.STATS, 0, 1, b""),
    ]


def test_a_server_that_was_replaced_while_it_was_called_is_hung_up_on():
    session = session_of(Placement(1, (0,)))
    old = View(0, epoch=1, primary=3, addresses={3: HERE})
    new = View(0, epoch=2, primary=4, addresses={4: HERE})
    session.view_changed(new)
    assert session.connected(old) == [DisconnectShard(0)]
    assert pushed(session, 0) == []
    assert pushes(session.connected(new)) == [(0, 0)]
    assert session.view_changed(new) == []
    assert session.view_changed(View(0, epoch=3, primary=5)) == [DisconnectShard(0)]


def test_a_query_is_answered_once_however_often_it_was_sent():
    session = session_of(Placement(1, (0,)), 0)
    session.query(Op.NORM, {0: b""})
    assert len(session.resend(0, Op.NORM)) == 1
    answer = AnswerMessage(Op.NORM, 0, memoryview(b"1"))
    assert session.receive(0, answer) == [QueryAnswered(*answer)]
    assert session.receive(0, answer) == []
    assert session.resend(0, Op.NORM) == []


def test_a_shard_that_has_left_answers_with_nothing():
    session = session_of(Placement(1, (0, 1)), 0, 1)
    session.query_shard(1, Op.HISTORY)
    retired = View(1, epoch=2, retired=True)
    actions = session.view_changed(retired)
    assert actions == [DisconnectShard(1), QueryAnswered(Op.HISTORY, 1, None)]
    assert session.query_shard(1, Op.STATS) == [QueryAnswered(Op.STATS, 1, None)]


def test_a_pull_makes_values_count_again_that_are_no_newer():
    session = session_of(Placement(1, (0,)), 0)
    session.begin()
    values = ValuesMessage(0, clock=0, oldest=0)
    assert not session.accept(0, values)
    session.receive(0, values)
    session.pull()
    assert session.missing([0]) == [0]
    assert session.accept(0, values)
    assert session.receive(0, values) == [ValuesArrived(0, 0)]
    assert session.resend(0, Op.PULL) == []


def test_values_that_are_too_stale_are_not_believed():
    session = WorkerSession(1, staleness=1)
    session.placement_changed(Placement(1, (0,)))
    for _ in range(3):
        session.request_step(b"")
    with pytest.raises(AssertionError):
        session.accept(0, ValuesMessage(0, clock=3, oldest=1))


def test_the_first_shard_that_is_lost_is_the_failure():
    session = WorkerSession(1)
    (first,) = session.fail(1, "it burned")
    session.fail(2, "it drowned")
    assert isinstance(first, ShardFailed)
    assert isinstance(session.failure, ServerLost)
    assert "shard 1 of the parameter servers is lost: it burned" in str(session.failure)


def test_all_workers_are_asked_to_stop_until_one_step_is_known():
    session = session_of(Placement(1, (0,)), 0)
    stop: ShardMessage = RequestMessage(Op.STOP)
    assert session.request_stop() == [ToShard(0, stop)]
    session.request_step(b"")
    values = ValuesMessage(0, clock=1, oldest=1, stop_at=4)
    session.accept(0, values)
    session.receive(0, values)
    assert session.stop_at == 4
    assert session.request_stop() == []
