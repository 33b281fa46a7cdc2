"""Primary of a shard: one server at a time, whichever server dies, stops or returns."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.parameter_server.coordinator.coordinator import Coordinator, View

HERE = ("127.0.0.1", 1)


def trio(lease_s: float = 2.0) -> Coordinator:
    """Return a coordinator of one shard: primary 0, backup 1, and 2 that is joining."""
    coordinator = Coordinator([0], [8], 1, lease_s)
    for server in range(3):
        coordinator.join(server, 0, HERE, now=0.0)
    coordinator.in_sync(0, 1, coordinator.views[0].epoch)
    return coordinator


def roles(view: View) -> tuple[int | None, tuple[int, ...], tuple[int, ...]]:
    return view.primary, view.backups, view.joining


def test_the_first_server_is_the_primary_and_the_others_join() -> None:
    assert roles(trio().views[0]) == (0, (1,), (2,))


def test_a_silent_primary_is_replaced_by_a_backup_not_by_a_joining_server() -> None:
    coordinator = trio()
    coordinator.heartbeat(1, 1.0)
    coordinator.heartbeat(2, 1.0)
    assert coordinator.tick(1.9) == []
    (view,) = coordinator.tick(2.1)
    assert roles(view) == (1, (), (2,))
    assert not coordinator.heartbeat(0, 2.2)  # it runs again, and is no member any more


def test_a_replaced_primary_that_returns_joins_with_nothing() -> None:
    coordinator = trio()
    coordinator.heartbeat(1, 2.0)
    coordinator.tick(2.1)
    (view,) = coordinator.join(0, 0, HERE, 3.0)
    assert view.joining[-1] == 0


def test_without_a_backup_a_silent_primary_may_return_a_dead_one_is_lost() -> None:
    coordinator = Coordinator([0], [8], 1, 2.0)
    coordinator.join(0, 0, HERE, 0.0)
    assert coordinator.tick(60.0) == []
    coordinator.disconnected(0)
    (view,) = coordinator.tick(60.0)
    assert view.lost
    assert coordinator.join(9, 0, HERE, 61.0) == []  # a new server has none of the values


def test_a_primary_that_hung_up_and_came_back_in_time_goes_on() -> None:
    coordinator = Coordinator([0], [8], 1, 2.0)
    coordinator.join(0, 0, HERE, 0.0)
    coordinator.disconnected(0)
    coordinator.join(0, 0, HERE, 1.0)
    assert coordinator.tick(9.0) == []


def test_the_next_coordinator_continues_from_the_saved_state() -> None:
    coordinator = trio()
    following = Coordinator([0], [8], 1, 2.0)
    following.from_json(coordinator.to_json(), now=50.0)
    assert following.views == coordinator.views
    assert following.tick(51.9) == []
    following.heartbeat(1, 52.0)
    assert roles(following.tick(52.1)[0])[0] == 1


@settings(max_examples=500)
@given(seed=st.integers(0, 2**32), lease=st.sampled_from([1.0, 2.0]))
def test_no_two_servers_ever_have_a_lease_and_epochs_only_grow(seed: int, lease: float) -> None:
    chance, coordinator, now = Random(seed), Coordinator([0], [8], 1, lease), 0.0
    leased: dict[int, float] = {}  # server -> end of its lease, by its own clock
    epoch, last = 0, 0
    for server in range(3):
        coordinator.join(server, 0, HERE, now)
    for _ in range(60):
        now += chance.random() * lease / 2
        server, sent = (
            chance.randrange(4),
            now - chance.random() * lease,
        )  # a beat may travel for a while
        match chance.randrange(5):
            case 0:
                coordinator.in_sync(0, server, coordinator.views[0].epoch)
            case 1 if chance.random() < 0.3:
                coordinator.disconnected(server)
            case 2 if chance.random() < 0.3:
                text = coordinator.to_json()
                coordinator = Coordinator([0], [8], 1, lease)
                coordinator.from_json(text, now)
            case _:
                if coordinator.heartbeat(server, now) and coordinator.views[0].primary == server:
                    leased[server] = max(leased.get(server, 0.0), sent + lease)
        coordinator.tick(now)
        view = coordinator.views[0]
        assert view.epoch >= epoch
        epoch = view.epoch
        holders = [server for server, until in leased.items() if until >= now]
        if view.primary is not None and view.primary != last:
            assert [h for h in holders if h != view.primary] == [], (holders, view)
            last = view.primary


def test_a_view_survives_the_way_through_json() -> None:
    view = trio().views[0]
    assert View.from_json(view.to_json()) == view
    with pytest.raises(KeyError):
        View.from_json({"shard": 0})
