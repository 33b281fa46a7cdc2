"""The hosts of ranks: each is filled before the next one gets a rank."""

from __future__ import annotations

import pytest

from shoal.launch.hosts.remote_ranks import HostRanks, placed


@pytest.mark.parametrize(
    ("processes", "expected"),
    [
        (1, [HostRanks(0, 0, 1)]),
        (2, [HostRanks(0, 0, 2)]),
        (3, [HostRanks(0, 0, 2), HostRanks(2, 2, 1)]),
        (6, [HostRanks(0, 0, 2), HostRanks(2, 2, 3), HostRanks(3, 5, 1)]),
    ],
)
def test_hosts_are_filled_in_their_order(processes: int, expected: list[HostRanks]) -> None:
    assert placed({0: 2, 2: 3, 3: 1}, processes) == expected
