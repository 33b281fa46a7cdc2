"""The closed form of parameter servers."""

from __future__ import annotations

import pytest

from shoal.costs import server_count


def test_pushing_is_bound_by_a_workers_link_or_by_the_servers() -> None:
    assert server_count.one_way(100.0, 10.0, workers=4, servers=4) == 10.0
    assert server_count.one_way(100.0, 10.0, workers=4, servers=2) == 20.0
    assert server_count.one_way(100.0, 10.0, workers=4, servers=8) == 10.0
    assert server_count.one_way(100.0, 10.0, workers=4, servers=8, server_rate=2.0) == 25.0


def test_as_many_servers_as_workers_saturate_equal_links() -> None:
    assert server_count.saturation(8, 1.0, 1.0) == 8
    assert server_count.saturation(8, 1.0, 4.0) == 2
    assert server_count.saturation(3, 2.0, 4.0) == 2


def test_with_many_parts_servers_take_half_of_a_rings_time() -> None:
    m = 100
    servers = server_count.servers_beside(1.0, 1.0, m, m, parts=1e9)
    assert servers / server_count.ring_beside(1.0, 1.0, m, 1e9) == pytest.approx(m / (2 * (m - 1)))


def test_an_exchange_hides_behind_enough_computing() -> None:
    # One way must fit into the forward pass of 10 s: 4 workers x 20 bytes / (4 x 1) = 20 > 10.
    assert server_count.hidden_from(10.0, 1.0, workers=4, compute_s=30.0) == 4
    assert server_count.hidden_from(5.0, 1.0, workers=4, compute_s=30.0) == 2
    assert server_count.hidden_from(100.0, 1.0, workers=4, compute_s=30.0) is None
    # Slow servers are no slow link: more of them hide it.
    assert server_count.hidden_from(100.0, 10.0, workers=4, compute_s=30.0, server_rate=1.0) == 40
