"""A worker connects to a server of its job, and a server accepts it, by the same settings."""

from __future__ import annotations

import contextlib
import socket

import pytest
import torch
from connected_channels import KEY, beside, needs_gmac, new_memory

from shoal.errors import WireError
from shoal.parameter_server.partitioning import ParamMeta, partition
from shoal.parameter_server.transport import secure_channel as channels
from shoal.parameter_server.transport import settings
from shoal.parameter_server.transport.frame import Header
from shoal.parameter_server.transport.key import Key
from shoal.parameter_server.transport.mac import GMAC, HMAC, Macs, macs
from shoal.parameter_server.transport.secure_channel import SecureChannel
from shoal.parameter_server.transport.settings import Transport

TRANSPORT = Transport(Key(KEY), "digits", limit_bytes=1000)


def connected(listener: int | str, asked: int | str) -> tuple[SecureChannel, SecureChannel, int]:
    """Return both ends of a connection to a listener, and the number that it got."""
    with (
        socket.create_server(("127.0.0.1", 0)) as port,
        beside(TRANSPORT.connect, port.getsockname(), asked, 5) as connecting,
    ):
        accepted, number = TRANSPORT.accept(port.accept()[0], listener)
        return connecting.result(), accepted, number


def test_both_ends_can_send_and_the_listener_knows_the_peers_number() -> None:
    ours, theirs, number = connected(2, 2)
    assert number == 5
    with contextlib.closing(ours), contextlib.closing(theirs):
        for sender, receiver in ((ours, theirs), (theirs, ours)):
            with beside(sender.send, Header(op=1), b"gradient"):
                assert receiver.receive(new_memory)[1] == b"gradient"
        with pytest.raises(WireError, match="the limit is 1000"):
            ours.send(Header(op=1), bytes(1001))


def test_a_peer_that_asks_for_another_listener_gets_the_reason() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as port,
        beside(TRANSPORT.connect, port.getsockname(), 3, 5) as connecting,
    ):
        with pytest.raises(WireError):
            TRANSPORT.accept(port.accept()[0], 2)
        with pytest.raises(WireError, match="another job than 'digits/3'"):
            connecting.result()


@pytest.mark.parametrize(
    ("stays_here", "mac"), [(True, HMAC), pytest.param(False, GMAC, marks=needs_gmac)]
)
def test_between_machines_payloads_have_the_best_mac_that_both_ends_know(
    monkeypatch: pytest.MonkeyPatch, stays_here: bool, mac: int
) -> None:
    made = []

    def seen(kind: int, key: bytes) -> Macs:
        made.append(kind)
        return macs(kind, key)

    monkeypatch.setattr(channels, "macs", seen)
    monkeypatch.setattr(settings, "is_loopback", lambda _: stays_here)
    ours, theirs, _ = connected(2, 2)
    with (
        contextlib.closing(ours),
        contextlib.closing(theirs),
        beside(ours.send, Header(op=1), b"gradient"),
    ):
        assert theirs.receive(new_memory)[1] == b"gradient"
    assert made == [mac] * 4


def test_the_limit_fits_the_largest_partition_with_its_state() -> None:
    parts = partition({"weight": ParamMeta(10**6, torch.float32, 0)}, 2**20)
    assert TRANSPORT.for_parts(parts).limit_bytes >= 4 * max(part.size_bytes for part in parts)
    assert TRANSPORT.for_coordinator().limit_bytes >= 2**24
