"""Connections that nobody can listen to, over real sockets."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from shaken import beside, read_to_end, sockets

from shoal.errors import ConfigError, ConnectionLost
from shoal.server.stream import receive_all
from shoal.server.tls import MAKE_ONE, refuse_bad, secured

WORDS = b"gradients and weights " * 200_000


def certificate(directory: Path) -> Path:
    """As the error of a missing one says to make it."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate; it is not installed")
    directory.mkdir(exist_ok=True)
    subprocess.run(MAKE_ONE, shell=True, cwd=directory, check=True, capture_output=True)
    return directory / "job.pem"


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificate(tmp_path_factory.mktemp("job"))


@contextlib.contextmanager
def both(pem: Path, caller: socket.socket, listener: socket.socket) -> Iterator[tuple[socket.socket, socket.socket]]:
    with beside(secured, listener, pem, server_side=True, limit_s=5) as accepting:
        ours = secured(caller, pem, server_side=False, limit_s=5)
    with ours, accepting.result() as theirs:
        yield ours, theirs


def said_by(speaker: socket.socket, hearer: socket.socket) -> bytes:
    """What arrives of WORDS."""
    heard = bytearray(len(WORDS))
    with beside(speaker.sendall, WORDS):
        receive_all(hearer, memoryview(heard))
    return bytes(heard)


def test_both_ends_speak_at_once_and_each_hears_all(pem: Path) -> None:
    with sockets("tcp") as (caller, listener), both(pem, caller, listener) as (ours, theirs):
        with beside(said_by, ours, theirs) as there:
            assert said_by(theirs, ours) == WORDS
        assert there.result() == WORDS


def test_what_was_said_before_hanging_up_arrives(pem: Path) -> None:
    with sockets("tcp") as (caller, listener), both(pem, caller, listener) as (ours, theirs):
        with beside(read_to_end, theirs) as heard:
            ours.sendall(WORDS)
            ours.shutdown(socket.SHUT_RDWR)
        assert heard.result() == WORDS


def test_who_listens_on_the_network_sees_none_of_it(pem: Path) -> None:
    seen: list[bytes] = []

    def pass_on(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                seen.append(piece)
                sink.sendall(piece)

    with sockets("tcp") as (caller, left), sockets("tcp") as (right, listener):
        for source, sink in ((left, right), (right, left)):
            threading.Thread(target=pass_on, args=(source, sink), daemon=True).start()
        with both(pem, caller, listener) as (ours, theirs):
            assert said_by(ours, theirs) == WORDS
    assert len(b"".join(seen)) > len(WORDS)
    assert b"gradients" not in b"".join(seen)


def test_a_peer_with_another_certificate_is_refused_at_both_ends(pem: Path, tmp_path: Path) -> None:
    other = certificate(tmp_path / "other")
    with sockets("tcp") as (caller, listener), beside(secured, listener, pem, server_side=True, limit_s=5) as accepting:
        with pytest.raises(ConnectionLost, match="Give all processes the certificate of this job"):
            secured(caller, other, server_side=False, limit_s=5)
        assert isinstance(accepting.exception(), ConnectionLost)


@pytest.mark.parametrize("words", [b"", b"SHOL in plain words, without any TLS"])
def test_a_peer_without_tls_is_refused(pem: Path, words: bytes) -> None:
    with sockets("tcp") as (caller, listener):
        caller.sendall(words)
        with pytest.raises(ConnectionLost, match="no TLS with the peer"):
            secured(listener, pem, server_side=True, limit_s=0.3)


def test_files_that_are_no_certificate_are_refused_with_the_command_that_makes_one(pem: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.pem"
    bad.write_text("no key")
    for path in (tmp_path / "none.pem", bad):
        with pytest.raises(ConfigError, match="Make one: openssl req"):
            refuse_bad(path)
    public = Path(shutil.copy(pem, tmp_path / "public.pem"))
    public.chmod(0o644)
    with pytest.raises(ConfigError, match="others can open it"):
        refuse_bad(public)
