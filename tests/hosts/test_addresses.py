"""Addresses of hosts, and connections that are tried between them."""

import contextlib
import ipaddress
import os
import socket
import threading

import pytest
from hosts_command import until

from shoal.errors import UsageError
from shoal.launch.hosts import reach
from shoal.launch.hosts.addresses import (
    candidate_addresses,
    choose_address,
    local_addresses,
)
from shoal.launch.hosts.reach import Reach, ReachListener, try_reach
from shoal.platform.interfaces import HostAddress, addresses_that_are_up

NONCE = "5e2a9c"
ETH = HostAddress("eth0", "10.0.0.1", 24)
IB = HostAddress("ib0", "10.1.0.1", 24)
V6 = HostAddress("eth0", "fd00::1", 64)


def works(address: str) -> Reach:
    return Reach(address, "10.0.0.2", "")


def fails(address: str, problem: str = "timed out") -> Reach:
    return Reach(address, None, problem)


def test_addresses_of_this_host_are_those_that_others_could_reach():
    everything = addresses_that_are_up()
    assert HostAddress("lo", "127.0.0.1", 8) in everything
    for one in local_addresses():
        address = ipaddress.ip_address(one.address)
        assert one in everything
        assert not address.is_loopback
        assert not address.is_link_local


def test_the_address_by_which_ssh_came_is_tried_first():
    assert candidate_addresses([ETH, IB, V6], "10.1.0.1") == ["10.1.0.1", "10.0.0.1", "fd00::1"]
    assert candidate_addresses([ETH, IB], "192.0.2.7") == ["10.0.0.1", "10.1.0.1"]
    assert candidate_addresses([], None) == ["127.0.0.1"]


def test_the_user_chooses_an_address_or_an_interface_that_there_is():
    assert candidate_addresses([ETH, IB, V6], None, interface="eth0") == ["10.0.0.1", "fd00::1"]
    assert candidate_addresses([ETH, IB, V6], None, address="FD00:0::1") == ["fd00::1"]
    with pytest.raises(UsageError, match="--interface eth7: the first host has eth0, ib0"):
        candidate_addresses([ETH, IB], None, interface="eth7")
    with pytest.raises(UsageError, match=r"--address 10.0.0.9: the first host has 10.0.0.1"):
        candidate_addresses([ETH], None, address="10.0.0.9")
    with pytest.raises(UsageError, match="not a name"):
        candidate_addresses([ETH], None, address="node1")


def test_the_first_address_that_all_reach_is_chosen():
    candidates = ["10.0.0.1", "10.1.0.1"]
    assert choose_address("a", candidates, {}) == "10.0.0.1"
    reports = {
        "b": [fails("10.0.0.1"), works("10.1.0.1")],
        "c": [works("10.0.0.1"), works("10.1.0.1")],
    }
    assert choose_address("a", candidates, reports) == "10.1.0.1"


def test_all_hosts_that_reach_nothing_are_named():
    candidates = ["10.0.0.1", "10.1.0.1"]
    reports = {
        "b": [fails("10.0.0.1"), fails("10.1.0.1", "no route to host")],
        "c": [works("10.0.0.1"), fails("10.1.0.1")],
        "d": [fails("10.0.0.1", "connection refused")],
    }
    cure = "Give --address or --interface, or let these hosts connect to each other"
    assert choose_address("a", candidates, reports) == [
        f"b cannot reach a (10.0.0.1: timed out; 10.1.0.1: no route to host). {cure}",
        f"d cannot reach a (10.0.0.1: connection refused; 10.1.0.1: not tried). {cure}",
    ]
    split = {
        "b": [works("10.0.0.1"), fails("10.1.0.1")],
        "c": [fails("10.0.0.1"), works("10.1.0.1")],
    }
    assert choose_address("a", candidates, split) == [
        "no address is reached by all hosts: 10.0.0.1 of a is not reached by c; "
        f"10.1.0.1 of a is not reached by b. {cure}"
    ]


def test_a_host_that_is_reached_says_by_which_address():
    with ReachListener(["127.0.0.1", "127.0.0.2", "192.0.2.77"], NONCE) as listener:
        assert list(listener.ports) == ["127.0.0.1", "127.0.0.2"]
        outcomes = try_reach(listener.ports, NONCE)
        assert outcomes == [
            Reach("127.0.0.1", "127.0.0.1", ""),
            Reach("127.0.0.2", "127.0.0.1", ""),
        ]
        assert [Reach.from_json(one.to_json()) for one in outcomes] == outcomes
    assert [one.problem for one in try_reach(listener.ports, NONCE)] == ["connection refused"] * 2
    listener.close()
    assert not [one for one in threading.enumerate() if one.name.startswith("reach")]
    with pytest.raises(ValueError, match="1 is not of the right type"):
        Reach.from_json({"address": 1})


def test_many_hosts_are_answered_at_once():
    with ReachListener(["127.0.0.1"], NONCE) as listener:
        port = listener.ports["127.0.0.1"]
        outcomes: list[Reach] = []
        hosts = [
            threading.Thread(target=lambda: outcomes.extend(try_reach({"127.0.0.1": port}, NONCE)))
            for _ in range(30)
        ]
        for one in hosts:
            one.start()
        for one in hosts:
            one.join()
    assert [one.problem for one in outcomes] == [""] * 30


def test_a_stranger_is_not_answered(monkeypatch):
    monkeypatch.setattr(reach, "REACH_S", 0.5)
    with ReachListener(["127.0.0.1"], NONCE) as listener:
        for said in (b"wrong\n", b"\xff\n", b"x" * 2000, b"no newline"):
            with socket.create_connection(("127.0.0.1", listener.ports["127.0.0.1"])) as stranger:
                stranger.sendall(said)
                stranger.settimeout(5)
                with contextlib.suppress(ConnectionResetError):
                    assert stranger.recv(10) == b""
        assert try_reach(listener.ports, NONCE)[0].problem == ""


def test_many_strangers_take_neither_the_descriptors_nor_the_answer(monkeypatch):
    monkeypatch.setattr(reach, "AT_ONCE", 4)
    with ReachListener(["127.0.0.1"], NONCE) as listener, contextlib.ExitStack() as strangers:
        port = listener.ports["127.0.0.1"]
        for _ in range(40):
            strangers.enter_context(socket.create_connection(("127.0.0.1", port)))
        until(lambda: accepted_at(port) >= 4)
        assert accepted_at(port) == 4
        strangers.close()
        assert try_reach(listener.ports, NONCE)[0].problem == ""


def accepted_at(port: int) -> int:
    """Return how many connections of this process were accepted at a port: it is their own side."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            found += one.family == socket.AF_INET and one.getsockname()[1] == port
    return found - 1  # the listener itself


def test_another_program_at_the_address_is_told(monkeypatch):
    monkeypatch.setattr(reach, "REACH_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        assert try_reach({"127.0.0.1": port}, NONCE)[0].problem == "timed out"
    with ReachListener(["127.0.0.1"], "other") as listener:
        assert try_reach(listener.ports, NONCE)[0].problem == "another program answers there"
    assert try_reach({}, NONCE) == []
