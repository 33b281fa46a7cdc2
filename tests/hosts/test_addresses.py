"""Addresses of hosts, and connections that are tried between them."""

import ipaddress
import os
import socket
import threading

import pytest

from shoal.errors import LaunchError, UsageError
from shoal.launch.hosts.addresses import (
    candidate_addresses,
    choose_address,
    listeners,
    local_addresses,
    try_reach,
)
from shoal.platform import interfaces
from shoal.platform.interfaces import HostAddress, addresses_that_are_up

ETH = HostAddress("eth0", "10.0.0.1")
IB = HostAddress("ib0", "10.1.0.1")

FIRST, SECOND, V6 = "10.0.0.1", "10.1.0.1", "fd00::1"
PORTS = {FIRST: 5000, SECOND: 5001}
WORKS, FAILS = "", "timed out"


def test_addresses_of_this_host_are_those_that_others_could_reach():
    everything = addresses_that_are_up()
    assert HostAddress("lo", "127.0.0.1") in everything
    for one in local_addresses():
        address = ipaddress.ip_address(one)
        assert one in [other.address for other in everything]
        assert not address.is_loopback
        assert not address.is_link_local


def test_the_address_by_which_ssh_came_is_tried_first():
    assert candidate_addresses([FIRST, SECOND, V6], SECOND) == [SECOND, FIRST, V6]
    assert candidate_addresses([FIRST, SECOND], "192.0.2.7") == [FIRST, SECOND]
    assert candidate_addresses([], None) == ["127.0.0.1"]


def test_the_user_chooses_an_address_that_there_is():
    assert candidate_addresses([FIRST, SECOND, V6], None, address="fd00::1") == ["fd00::1"]
    with pytest.raises(UsageError, match=r"--address 10.0.0.9: the first host has 10.0.0.1"):
        candidate_addresses([FIRST], None, address="10.0.0.9")
    with pytest.raises(UsageError, match="the first host has"):
        candidate_addresses([FIRST], None, address="node1")


def test_the_first_address_that_all_reach_is_chosen():
    assert choose_address("a", PORTS, {}) == FIRST
    reports = {"b": {FIRST: FAILS, SECOND: WORKS}, "c": {FIRST: WORKS, SECOND: WORKS}}
    assert choose_address("a", PORTS, reports) == SECOND


def test_all_hosts_that_reach_nothing_are_named():
    reports = {
        "b": {FIRST: FAILS, SECOND: "no route to host"},
        "c": {FIRST: WORKS, SECOND: FAILS},
        "d": {FIRST: WORKS, SECOND: WORKS},
    }
    with pytest.raises(LaunchError) as refused:
        choose_address("a", PORTS, reports)
    cure = "Give --address, or let these hosts connect to each other"
    assert str(refused.value).splitlines()[1:] == [
        f"  b cannot reach a (10.0.0.1: timed out; 10.1.0.1: no route to host). {cure}",
        f"  c cannot reach a (10.1.0.1: timed out). {cure}",
    ]


def test_a_host_says_which_addresses_it_reaches():
    sockets = listeners(["127.0.0.1", "127.0.0.2", "192.0.2.77"])
    ports = {address: one.getsockname()[1] for address, one in sockets.items()}
    assert list(ports) == ["127.0.0.1", "127.0.0.2"]
    assert try_reach(ports) == dict.fromkeys(ports, "")
    for one in sockets.values():
        one.close()
    assert [*try_reach(ports).values()] == ["connection refused"] * 2
    assert not [one for one in threading.enumerate() if one.name.startswith("reach")]
    assert try_reach({}) == {}


def test_a_stranger_takes_no_descriptor_and_hears_nothing():
    before = len(os.listdir("/proc/self/fd"))
    with listeners(["127.0.0.1"])["127.0.0.1"] as listener:
        ports = {"127.0.0.1": listener.getsockname()[1]}
        for _ in range(40):
            with socket.create_connection(("127.0.0.1", ports["127.0.0.1"])) as stranger:
                stranger.sendall(b"x" * 2000)
                stranger.settimeout(0.01)
                with pytest.raises(TimeoutError):
                    stranger.recv(1)
        assert len(os.listdir("/proc/self/fd")) == before + 1
        assert try_reach(ports)["127.0.0.1"] == ""


@pytest.mark.parametrize(
    ("target", "sources", "expected"),
    [
        ("node1", {"node1": "10.1.0.1"}, "ib0"),
        ("node0", {"node0": "127.0.1.1", "192.0.2.1": "10.1.0.1"}, "ib0"),  # this host, on Debian
        ("node0", {"node0": "127.0.1.1"}, "eth0"),
        ("127.0.0.1", {"127.0.0.1": "127.0.0.1", "192.0.2.1": "10.1.0.1"}, None),
    ],
)
def test_the_interface_towards_a_host_is_that_of_the_route_and_never_loopback(
    monkeypatch, target, sources, expected
):
    up = [HostAddress("lo", "127.0.0.1"), ETH, IB]
    monkeypatch.setattr(interfaces, "addresses_that_are_up", lambda: up)

    def own_address_towards(target: str) -> str:
        if target not in sources:
            raise OSError("no route")
        return sources[target]

    monkeypatch.setattr(interfaces, "own_address_towards", own_address_towards)
    assert interfaces.route_interface(target) == expected
