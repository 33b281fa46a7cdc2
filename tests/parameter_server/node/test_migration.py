"""Partitions that migrate between shards, as the coordinator decides it."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.parameter_server.coordinator.coordinator import Coordinator
from shoal.parameter_server.partitioning import rebalance

HERE = ("127.0.0.1", 1)


def test_a_new_shard_gets_partitions_when_its_first_server_has_joined() -> None:
    coordinator = Coordinator([0, 0, 1, 1], [8, 8, 8, 8], 2, 2.0)
    coordinator.join(10, 0, HERE, 0.0)
    coordinator.join(11, 1, HERE, 0.0)
    assert coordinator.add().shard == 2
    assert not coordinator.placement.moving
    coordinator.join(12, 2, HERE, 0.0)
    ((part, move),) = coordinator.placement.moving.items()
    assert move.target == 2
    coordinator.transfer_done(
        12, part, move.start_version, source=10 + coordinator.placement.owners[part]
    )
    assert coordinator.placement.owners[part] == 2


def test_a_new_shard_gets_partitions_when_all_its_replicas_are_in_sync() -> None:
    coordinator = Coordinator([0, 0], [8, 8], 1, 2.0, replicas=2)
    coordinator.join(10, 0, HERE, 0.0)
    coordinator.add()
    coordinator.join(12, 1, HERE, 0.0)
    coordinator.join(13, 1, HERE, 0.0)
    assert coordinator.is_filling(1)
    assert (
        not coordinator.placement.moving
    )  # the loss of server 12 would be the loss of what it was given
    coordinator.in_sync(1, 13, coordinator.views[1].epoch)
    assert not coordinator.is_filling(1)
    assert [move.target for move in coordinator.placement.moving.values()] == [1]
    assert not coordinator.is_filling(
        0
    )  # what has parts from the beginning keeps them, whoever is there


def test_a_leaving_shard_retires_when_its_last_partition_has_migrated() -> None:
    coordinator = Coordinator([0, 1, 1], [8, 8, 8], 2, 2.0)
    coordinator.join(10, 0, HERE, 0.0)
    coordinator.join(11, 1, HERE, 0.0)
    assert coordinator.remove(1) == ""
    assert coordinator.remove(1) == "shard 1 is leaving already"
    assert sorted(coordinator.placement.moving) == [1, 2]
    since = coordinator.placement.moving[1].start_version
    assert coordinator.transfer_done(10, 1, since, source=11) == []
    (retired,) = coordinator.transfer_done(10, 2, since, source=11)
    assert retired.retired
    assert retired.members == ()
    assert coordinator.placement.owners == (0, 0, 0)
    following = Coordinator([0, 1, 1], [8, 8, 8], 2, 2.0)
    following.from_json(coordinator.to_json(), 0.0)
    assert following.placement == coordinator.placement
    assert following.views == coordinator.views


def test_a_leaving_shard_without_partitions_retires_at_once() -> None:
    coordinator = Coordinator([0, 0, 1, 1], [8, 8, 8, 8], 2, 2.0)
    coordinator.join(10, 0, HERE, 0.0)
    coordinator.join(11, 1, HERE, 0.0)
    coordinator.add()
    coordinator.join(12, 2, HERE, 0.0)
    coordinator.remove(2)
    assert not coordinator.placement.moving
    (retired,) = coordinator.tick(0.1)
    assert retired.shard == 2
    assert retired.retired


def test_a_transfer_from_a_replaced_server_is_not_accepted() -> None:
    coordinator = Coordinator([0, 1], [8, 8], 2, 2.0)
    coordinator.join(10, 0, HERE, 0.0)
    coordinator.join(11, 1, HERE, 0.0)
    coordinator.join(12, 1, HERE, 0.0)
    coordinator.in_sync(1, 12, coordinator.views[1].epoch)
    coordinator.remove(1)
    since = coordinator.placement.moving[1].start_version
    coordinator.heartbeat(10, 5.0)
    coordinator.heartbeat(12, 5.0)
    coordinator.tick(5.0)  # 11 has been silent, 12 takes over
    coordinator.transfer_done(10, 1, since, source=11)
    assert coordinator.placement.owners == (0, 1)
    coordinator.transfer_done(10, 1, since, source=12)
    assert coordinator.placement.owners == (0, 0)


def test_a_new_shard_that_dies_before_it_owns_anything_loses_nothing() -> None:
    coordinator = Coordinator([0, 0], [8, 8], 1, 2.0)
    coordinator.join(10, 0, HERE, 0.0)
    coordinator.add()
    coordinator.join(11, 1, HERE, 0.0)
    assert coordinator.placement.moving
    coordinator.heartbeat(10, 5.0)
    coordinator.disconnected(11)
    (gone,) = coordinator.tick(5.0)
    assert gone.retired
    assert not gone.lost
    assert not coordinator.placement.moving


@pytest.mark.parametrize(
    ("shard", "words"),
    [(0, "shard 0 stays"), (5, "there is no shard 5; there are 0, 1"), (-1, "no shard -1")],
)
def test_the_reason_why_a_shard_cannot_be_removed_is_returned(shard: int, words: str) -> None:
    coordinator = Coordinator([0, 1], [8, 8], 2, 2.0)
    assert words in coordinator.remove(shard)


@given(
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=30),
    servers=st.integers(1, 5),
    seed=st.integers(0, 100),
)
def test_after_a_rebalance_no_single_move_would_improve_it(
    sizes: list[int], servers: int, seed: int
) -> None:
    owners = [Random(seed + part).randrange(servers + 1) for part in range(len(sizes))]
    moves = rebalance(sizes, owners, range(servers))
    after = [moves.get(part, owner) for part, owner in enumerate(owners)]
    assert set(after) <= set(range(servers))
    assert all(target != owners[part] for part, target in moves.items())
    given = {
        server: sum(s for s, owner in zip(sizes, after, strict=True) if owner == server)
        for server in range(servers)
    }
    fullest = max(given, key=lambda server: given[server])
    for part, owner in enumerate(after):
        for target in given.keys() - {fullest} if owner == fullest else ():
            assert given[target] + sizes[part] >= given[fullest]
