"""A worker connects to a server of its job, a server accepts it, and strangers are refused."""

from __future__ import annotations

import contextlib
import pickle
import random
import socket
import struct
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import torch
from connected_channels import KEY, TLS, beside, needs_tls, new_memory, read_to_end

from shoal.errors import ConfigError, ConnectionLost, WireError
from shoal.parameter_server.partitioning import ParamMeta, partition
from shoal.parameter_server.transport import key as keys
from shoal.parameter_server.transport import settings
from shoal.parameter_server.transport.key import Key
from shoal.parameter_server.transport.settings import UNIX, Transport, address_of, listen

TRANSPORT = Transport(Key(KEY), "digits", limit_bytes=1000)
PLAIN = Transport(Key(KEY), "digits", limit_bytes=1000, encrypt=False)
NETWORKS = {"unix": (UNIX, TRANSPORT), "plain": ("127.0.0.1", PLAIN)}
NETWORKS["tls"] = ("127.0.0.1", TRANSPORT)
every_network = pytest.mark.parametrize("network", ["unix", "plain", TLS])


@contextlib.contextmanager
def listening(network: str, name: int | str = 2) -> Iterator[tuple[tuple[str, int], Future]]:
    """Yield the address of a listener, and what becomes of the first connection to it."""
    host, transport = NETWORKS[network]

    def accept() -> object:
        return transport.accept(listener.accept()[0], name)

    with listen(host) as listener, beside(accept) as accepting:
        yield address_of(listener), accepting


@every_network
def test_both_ends_can_send_and_the_listener_knows_the_peers_number(network: str) -> None:
    with listening(network) as (address, accepting):
        ours = NETWORKS[network][1].connect(address, 2, 5)
        theirs, number = accepting.result()
    assert number == 5
    with contextlib.closing(ours), contextlib.closing(theirs):
        for sender, receiver in ((ours, theirs), (theirs, ours)):
            with beside(sender.post, 1, b"gradient"):
                assert receiver.receive(new_memory)[1] == b"gradient"
        with pytest.raises(WireError, match="the limit is 1000"):
            ours.post(1, bytes(1001))


@every_network
@pytest.mark.parametrize(
    ("other", "name"),
    [
        (Transport(Key(bytes(32)), "digits"), 2),
        (Transport(Key(KEY), "letters"), 2),
        (Transport(Key(KEY), "digits"), 3),
    ],
    ids=["another key", "another job", "another server"],
)
def test_who_asks_for_another_job_or_server_is_refused_and_told(
    network: str, other: Transport, name: int
) -> None:
    transport = NETWORKS[network][1]
    caller = Transport(other.key, other.job, encrypt=transport.encrypt)
    with listening(network) as (address, accepting):
        why = (
            "has another certificate" if network == "tls" and other.key.secret != KEY else "is not"
        )
        with pytest.raises(WireError, match=why):
            caller.connect(address, name, 5)
        assert isinstance(accepting.exception(), WireError)


@needs_tls
def test_who_listens_between_machines_sees_no_numbers_unless_encrypt_is_false() -> None:
    for network, is_seen in (("tls", False), ("plain", True)):
        heard = bytearray()
        with (
            listening(network) as (address, accepting),
            tapped(address, heard) as tap,
            contextlib.closing(NETWORKS[network][1].connect(tap, 2, 5)) as ours,
        ):
            theirs, _number = accepting.result()
            for sender, receiver in ((ours, theirs), (theirs, ours)):
                sender.post(1, b"gradient" * 100)
                assert receiver.receive(new_memory)[1] == b"gradient" * 100
            theirs.close()
        assert len(heard) > 1600
        assert (b"gradient" in heard) == is_seen


@contextlib.contextmanager
def tapped(address: tuple[str, int], heard: bytearray) -> Iterator[tuple[str, int]]:
    """Yield an address that leads to another one, and keep all that goes over it."""

    def pass_on(source: socket.socket, sink: socket.socket) -> None:
        while piece := source.recv(1 << 16):
            heard.extend(piece)
            sink.sendall(piece)
        sink.shutdown(socket.SHUT_WR)

    def serve() -> None:
        near, _ = listener.accept()
        with near, socket.create_connection(address) as far, beside(pass_on, near, far):
            pass_on(far, near)

    with socket.create_server(("127.0.0.1", 0)) as listener, beside(serve):
        yield listener.getsockname()


@needs_tls
def test_ends_that_differ_in_encrypt_say_so() -> None:
    with listening("tls") as (address, accepting):
        with pytest.raises(WireError):
            PLAIN.connect(address, 2, 5)
        assert "one setting of encrypt" in str(accepting.exception())
    with listening("plain") as (address, accepting):
        with pytest.raises(WireError):
            TRANSPORT.connect(address, 2, 5)
        assert "one setting of encrypt" in str(accepting.exception())


@needs_tls
def test_a_peer_without_a_certificate_is_refused() -> None:
    context = keys.tls_context.__wrapped__(Key(KEY), False)
    bare = type(context)(context.protocol)
    bare.check_hostname, bare.verify_mode = False, 0
    with listening("tls") as (address, accepting), socket.create_connection(address) as sock:
        with bare.wrap_socket(sock) as end, contextlib.suppress(OSError):
            end.recv(1)
        assert "PEER_DID_NOT_RETURN_A_CERTIFICATE" in str(accepting.exception())


@needs_tls
def test_nothing_older_than_tls_1_3_is_spoken() -> None:
    context = keys.tls_context.__wrapped__(Key(KEY), False)
    context.minimum_version = context.maximum_version = context.minimum_version.TLSv1_2
    with listening("tls") as (address, accepting), socket.create_connection(address) as sock:
        with pytest.raises(OSError, match=r"(?i)protocol"):
            context.wrap_socket(sock)
        assert "UNSUPPORTED_PROTOCOL" in str(accepting.exception())


@needs_tls
def test_a_turned_bit_on_the_way_is_refused_wherever_it_is() -> None:
    generator = random.Random(3)
    for _ in range(20):
        with listening("tls") as (address, accepting):
            ours = TRANSPORT.connect(address, 2, 5)
            theirs, _number = accepting.result()
        with contextlib.closing(ours), contextlib.closing(theirs):
            record = bytearray(ours._stream._encrypted(bytes(100)))  # type: ignore[attr-defined]
            record[generator.randrange(5, len(record))] ^= 1 << generator.randrange(8)
            ours._stream._sock.sendall(record)
            with pytest.raises(WireError, match="damaged or not the peer's"):
                theirs.receive(new_memory)


@pytest.mark.parametrize("network", ["unix", "plain"])
@pytest.mark.parametrize(
    ("start", "why"),
    [
        (b"GET / HTTP/1.1\r\n", "the peer is no Shoal worker: it begins with b'GET '"),
        (b"SHPS\4\0" + bytes(33), "the worker speaks version 4 of the wire, this end 5"),
        (b"SHPS\5\0" + bytes(35), "no handshake: the peer closed the connection"),
    ],
)
def test_another_start_is_refused_and_hears_magic_and_version(
    network: str, start: bytes, why: str
) -> None:
    with listening(network) as (address, accepting):
        with settings._connected(address, 5) as sock:
            sock.sendall(start)
            with contextlib.suppress(OSError):  # it was refused by then
                sock.shutdown(socket.SHUT_WR)
            assert read_to_end(sock) == struct.pack("<4sH", b"SHPS", settings.VERSION)
        assert why in str(accepting.exception())


@every_network
def test_a_peer_that_is_silent_or_slow_is_refused_after_the_limit(
    network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "HANDSHAKE_S", 0.3)
    for is_silent in (True, False):
        begin_s = time.monotonic()
        with listening(network) as (address, accepting), settings._connected(address, 5) as sock:
            # The beginning of a record of TLS, or of a handshake of ours, byte by byte.
            words = b"\x16\x03\x01\x02\x00" if network == "tls" else b"SHPS\5\0"
            for number in [] if is_silent else words * 8:
                if not accepting.done():
                    with contextlib.suppress(OSError):  # it may be refused just now
                        sock.sendall(bytes([number]))
                    time.sleep(0.1)
            error = accepting.exception()
        assert isinstance(error, WireError)
        assert time.monotonic() - begin_s < 4


@pytest.mark.parametrize("network", ["unix", "plain"])
def test_random_bytes_are_refused_100_times(network: str) -> None:
    generator = random.Random(7)
    for _ in range(100):
        with listening(network) as (address, accepting):
            with settings._connected(address, 5) as sock, contextlib.suppress(OSError):
                sock.sendall(generator.randbytes(generator.randrange(1, 200)))
            assert isinstance(accepting.exception(), WireError)


def test_nobody_who_listens_is_a_refused_connection() -> None:
    for host in (UNIX, "127.0.0.1"):
        with listen(host) as listener:
            address = address_of(listener)
        with pytest.raises(ConnectionRefusedError):
            PLAIN.connect(address, 2, 5)


def test_a_unix_listener_has_no_file() -> None:
    with listen(UNIX) as listener:
        assert listener.getsockname()[0] == 0


def test_a_process_of_another_user_is_refused_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening("unix") as (address, accepting):
        monkeypatch.setattr(settings.os, "geteuid", lambda: 54321)
        with pytest.raises(WireError, match="a process of user"):
            TRANSPORT.connect(address, 2, 5)
        assert "not yours" in str(accepting.exception())


def test_a_key_is_never_printed_and_settings_go_to_other_processes() -> None:
    assert "\\x01\\x02\\x03" not in repr(TRANSPORT)
    assert pickle.loads(pickle.dumps(TRANSPORT)) == TRANSPORT


@needs_tls
def test_every_host_makes_the_same_certificate_of_a_key() -> None:
    assert keys._certificate(Key(KEY)) == keys._certificate(Key(KEY))
    assert keys._certificate(Key(KEY))[0] != keys._certificate(Key(bytes(32)))[0]


def test_without_the_package_the_error_has_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    assert not keys.can_encrypt()
    with pytest.raises(ConfigError, match=r'pip install "shoal\[tls\]", on every host'):
        keys._certificate(Key(KEY))


def test_the_limit_fits_the_largest_partition_with_its_state() -> None:
    parts = partition({"weight": ParamMeta(10**6, torch.float32, 0)}, 2**20)
    assert TRANSPORT.for_parts(parts).limit_bytes >= 4 * max(part.size_bytes for part in parts)
    assert TRANSPORT.for_parts([]).limit_bytes >= 2**24  # the placement of any model


def test_a_listener_that_closes_at_once_is_a_lost_connection() -> None:
    with (
        listen(UNIX) as listener,
        beside(lambda: listener.accept()[0].close()),
        pytest.raises(ConnectionLost, match=r"no handshake|was lost"),
    ):
        TRANSPORT.connect(address_of(listener), 2, 5)
