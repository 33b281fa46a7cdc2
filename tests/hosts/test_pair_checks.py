"""Hosts that answer the command and not each other: what a run waits for, and what it leaves out.

Here the hosts are simulated; `test_parted_hosts.py` has real ones.
"""

from __future__ import annotations

import random
import socket
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.launch.hosts import hosts_job
from shoal.launch.hosts.hosts_job import RETRIES_S, HostsJob
from shoal.launch.hosts.pair_checks import PartedPair, largest_group
from shoal.launch.hosts.remote_work import HostsOptions
from shoal.launch.hosts.ssh_hosts import SshHost


def pairs(*hosts: tuple[int, int]) -> list[PartedPair]:
    return [PartedPair(pair, "10.0.0.1: timed out") for pair in hosts]


@pytest.mark.parametrize(
    ("parted", "kept"),
    [
        ([], [0, 1, 2, 3]),
        ([(1, 2)], [0, 1, 3]),
        ([(0, 1), (0, 2), (0, 3)], [1, 2, 3]),
        ([(0, 1), (1, 2), (2, 3)], [0, 2]),
        ([(0, 1), (2, 3)], [0, 2]),
        ([(0, 1), (0, 2), (1, 2)], [0, 3]),
        (list(combinations(range(4), 2)), [0]),
    ],
)
def test_the_most_hosts_that_reach_each_other_are_kept_the_first_of_equal_ones(parted, kept):
    assert largest_group(dict.fromkeys(range(4), 1), pairs(*parted)) == kept


def test_of_equally_many_hosts_those_with_room_for_more_ranks_are_kept():
    assert largest_group({0: 1, 1: 2, 2: 4}, pairs((1, 2))) == [0, 2]


def test_a_network_that_falls_into_halves_keeps_the_larger_one_and_takes_no_time():
    left, right = range(20), range(20, 45)
    cut = [(first, second) for first in left for second in right]
    assert largest_group(dict.fromkeys(range(45), 1), pairs(*cut)) == list(right)


def test_among_many_pairs_without_a_pattern_a_group_is_found_without_trying_all():
    draw = random.Random(1)
    cut = [pair for pair in combinations(range(100), 2) if draw.random() < 0.05]
    kept = largest_group(dict.fromkeys(range(100), 1), pairs(*cut))
    assert not any(first in kept and second in kept for first, second in cut)
    assert len(kept) > 30


class Network:
    """Three connected hosts of a simulated job, and its time.

    Args:
        parted: the pairs that do not reach each other, until `heals_s`.
    """

    def __init__(self, parted: list[tuple[int, int]], heals_s: float = 1e9) -> None:
        self.connected = [0, 1, 2]
        self.now_s = 0.0
        self._parted, self._heals_s = parted, heals_s

    def name(self, host: int) -> str:
        return "abc"[host]

    def connect(self, hosts: list[int], sources: Any) -> list[str]:
        return []

    def pump(self, timeout_s: float, sources: Any) -> None:
        self.now_s += timeout_s

    def parted_pairs(self, connections: Any, sources: Any) -> list[PartedPair]:
        return pairs(*self._parted) if self.now_s < self._heals_s else []


def available(
    network: Network, patch: pytest.MonkeyPatch, processes: int = 6, **options: Any
) -> tuple[int, list[int]]:
    """Return how many ranks can go on, and on which hosts."""
    patch.setattr(hosts_job, "parted_pairs", network.parted_pairs)
    patch.setattr(hosts_job, "clock_s", lambda: network.now_s)
    patch.setattr(hosts_job, "host_problems", lambda *_: [])
    hosts = [SshHost(name, 2) for name in "abc"]
    work = SimpleNamespace(request=None, problems=lambda processes: ())
    job = HostsJob(network, HostsOptions(hosts, "python", **options), work, b"")
    reader, writer = socket.socketpair()
    with reader, writer:
        found = job.available(processes, reader)
    return found, list(job._slots())


def test_a_run_waits_until_its_hosts_reach_each_other(monkeypatch, capsys):
    network = Network([(1, 2)], heals_s=25)
    assert available(network, monkeypatch, min_hosts=1) == (6, [0, 1, 2])
    assert network.now_s == 40
    told = "note: c and b cannot reach each other (10.0.0.1: timed out)\n"
    assert capsys.readouterr().err == told * 2


def test_a_run_goes_on_without_the_fewest_hosts_after_the_limit(monkeypatch, capsys):
    network = Network([(0, 1), (1, 2)])
    assert available(network, monkeypatch, min_hosts=2) == (4, [0, 2])
    assert network.now_s == sum(RETRIES_S)
    assert "note: the run goes on without b\n" in capsys.readouterr().err


@pytest.mark.parametrize("min_hosts", [None, 3])
def test_a_run_that_needs_both_of_a_parted_pair_names_it_in_the_end(monkeypatch, capsys, min_hosts):
    network = Network([(1, 2)])
    found, _ = available(network, monkeypatch, min_hosts=min_hosts)
    assert found == 0
    assert capsys.readouterr().err.endswith(
        "note: c and b cannot reach each other (10.0.0.1: timed out), for 130 s now. Let these "
        "hosts connect to each other and start the same command again; --min-hosts N lets a run go "
        "on without some of its hosts\n"
    )


def test_ranks_that_find_room_beside_a_parted_host_do_not_wait(monkeypatch):
    network = Network([(0, 1)])
    assert available(network, monkeypatch, processes=4) == (4, [0, 2])
    assert network.now_s == 0
