"""Who owns a shard: one at a time, whatever dies, stops or comes back."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.parameter_server.coordinator.coordinator import Coordinator, View

HERE = ("127.0.0.1", 1)


def trio(lease_s: float = 2.0) -> Coordinator:
    """A primary 0, a backup 1, and 2 that is being filled."""
    arbiter = Coordinator([0], [8], 1, lease_s)
    for server in range(3):
        arbiter.join(server, 0, HERE, now=0.0)
    arbiter.in_sync(0, 1, arbiter.views[0].epoch)
    return arbiter


def who(view: View) -> tuple[int | None, tuple[int, ...], tuple[int, ...]]:
    return view.primary, view.backups, view.joining


def test_the_first_is_the_primary_and_the_others_join() -> None:
    assert who(trio().views[0]) == (0, (1,), (2,))


def test_a_silent_primary_is_replaced_by_a_backup_and_not_by_one_that_is_being_filled() -> None:
    arbiter = trio()
    arbiter.heartbeat(1, 1.0)
    arbiter.heartbeat(2, 1.0)
    assert arbiter.tick(1.9) == []
    (view,) = arbiter.tick(2.1)
    assert who(view) == (1, (), (2,))
    assert not arbiter.heartbeat(0, 2.2)  # it wakes up, and has nothing any more


def test_one_that_comes_back_after_it_was_replaced_joins_with_nothing() -> None:
    arbiter = trio()
    arbiter.heartbeat(1, 2.0)
    arbiter.tick(2.1)
    (view,) = arbiter.join(0, 0, HERE, 3.0)
    assert view.joining[-1] == 0


def test_without_a_backup_a_silent_primary_is_waited_for_and_a_dead_one_is_the_end() -> None:
    arbiter = Coordinator([0], [8], 1, 2.0)
    arbiter.join(0, 0, HERE, 0.0)
    assert arbiter.tick(60.0) == []
    arbiter.disconnected(0)
    (view,) = arbiter.tick(60.0)
    assert view.lost
    assert arbiter.join(9, 0, HERE, 61.0) == []  # a new one has nothing to offer


def test_a_primary_that_hung_up_and_came_back_in_time_goes_on() -> None:
    arbiter = Coordinator([0], [8], 1, 2.0)
    arbiter.join(0, 0, HERE, 0.0)
    arbiter.disconnected(0)
    arbiter.join(0, 0, HERE, 1.0)
    assert arbiter.tick(9.0) == []


def test_the_next_arbiter_knows_what_this_one_knew() -> None:
    arbiter = trio()
    following = Coordinator([0], [8], 1, 2.0)
    following.from_json(arbiter.to_json(), now=50.0)
    assert following.views == arbiter.views
    assert following.tick(51.9) == []
    following.heartbeat(1, 52.0)
    assert who(following.tick(52.1)[0])[0] == 1


@settings(max_examples=500)
@given(seed=st.integers(0, 2**32), lease=st.sampled_from([1.0, 2.0]))
def test_no_two_ever_hold_a_lease_and_epochs_only_grow(seed: int, lease: float) -> None:
    chance, arbiter, now = Random(seed), Coordinator([0], [8], 1, lease), 0.0
    leased: dict[int, float] = {}  # until when each believes to be the primary, by its own clock
    epoch, last = 0, 0
    for server in range(3):
        arbiter.join(server, 0, HERE, now)
    for _ in range(60):
        now += chance.random() * lease / 2
        server, sent = (
            chance.randrange(4),
            now - chance.random() * lease,
        )  # a beat may travel for a while
        match chance.randrange(5):
            case 0:
                arbiter.in_sync(0, server, arbiter.views[0].epoch)
            case 1 if chance.random() < 0.3:
                arbiter.disconnected(server)
            case 2 if chance.random() < 0.3:
                text = arbiter.to_json()
                arbiter = Coordinator([0], [8], 1, lease)
                arbiter.from_json(text, now)
            case _:
                if arbiter.heartbeat(server, now) and arbiter.views[0].primary == server:
                    leased[server] = max(leased.get(server, 0.0), sent + lease)
        arbiter.tick(now)
        view = arbiter.views[0]
        assert view.epoch >= epoch
        epoch = view.epoch
        holders = [server for server, until in leased.items() if until >= now]
        if view.primary is not None and view.primary != last:
            assert [h for h in holders if h != view.primary] == [], (holders, view)
            last = view.primary


def test_a_view_survives_its_way_as_json() -> None:
    view = trio().views[0]
    assert View.from_json(view.to_json()) == view
    with pytest.raises(KeyError):
        View.from_json({"shard": 0})
