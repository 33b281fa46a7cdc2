"""The control socket of a run: its permissions, its requests, and its removal."""

from __future__ import annotations

import json
import os
import select
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.launch import control_channel
from shoal.launch.control_channel import (
    MAX_LINE_BYTES,
    NAME,
    ControlServer,
    send,
    short_name,
)


@contextmanager
def open_server(folder: Path) -> Iterator[ControlServer]:
    with ControlServer(folder, ".") as server:
        assert server.open() == ""
        yield server


def connected(folder: Path) -> socket.socket:
    caller = socket.socket(socket.AF_UNIX)
    caller.settimeout(10)
    with short_name(folder / NAME) as name:
        caller.connect(name)
    return caller


def next_requests(server: ControlServer) -> list[tuple[socket.socket, dict]]:
    """Wait for an event, and return the requests that have arrived."""
    select.select(server.sources, [], [], 10)
    return server.accept_requests()


def test_only_the_owner_may_use_it_and_it_is_removed_at_the_end(tmp_path):
    before = os.umask(0)
    try:
        with open_server(tmp_path):
            assert stat.S_IMODE((tmp_path / NAME).stat().st_mode) == 0o600
            assert os.umask(0) == 0
    finally:
        os.umask(before)
    assert list(tmp_path.iterdir()) == []


def test_it_waits_until_the_run_has_claimed_the_directory(tmp_path):
    with ControlServer(tmp_path / "run", "config.yaml") as server:
        assert server.open() == ""
        (tmp_path / "run").mkdir()
        assert server.open() == ""
        assert server.is_pending
        assert server.sources == server.accept_requests() == []
        (tmp_path / "run/config.yaml").touch()
        assert server.open() == ""
        assert not server.is_pending
        connected(tmp_path / "run").close()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.yaml"]


def test_a_request_is_answered_in_lines(tmp_path):
    with open_server(tmp_path) as server, connected(tmp_path) as command:
        command.sendall(b'{"scale": 3}\n')
        ((caller, request),) = next_requests(server)
        assert request == {"scale": 3}
        send(caller, stopping=2)
        send(caller, step=7)
        caller.close()
        assert [json.loads(line) for line in command.makefile()] == [{"stopping": 2}, {"step": 7}]
        assert len(server.sources) == 1


@pytest.mark.parametrize(
    "line", [b"\n", b"scale 3\n", b"[3]\n", b"\xff\xfe\n", b"x" * (MAX_LINE_BYTES + 1)]
)
def test_a_malformed_request_is_refused_and_the_next_is_read(tmp_path, line):
    with open_server(tmp_path) as server:
        with connected(tmp_path) as command:
            command.sendall(line)
            assert next_requests(server) == []
            assert len(server.sources) == 1
            assert "this is no request" in json.loads(command.makefile().readline())["refused"]
        with connected(tmp_path) as command:
            command.sendall(b"{}\n")
            ((caller, _),) = next_requests(server)
            caller.close()


def test_a_closed_connection_is_forgotten(tmp_path):
    with open_server(tmp_path) as server:
        connected(tmp_path).close()
        assert next_requests(server) == []
        assert len(server.sources) == 1


def test_a_command_that_says_nothing_does_not_hold_the_launcher(tmp_path, monkeypatch):
    monkeypatch.setattr(control_channel, "READ_S", 0.05)
    with open_server(tmp_path) as server, connected(tmp_path) as command:
        command.sendall(b'{"scale"')
        assert next_requests(server) == []
        assert "this is no request" in json.loads(command.makefile().readline())["refused"]


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    directory = tmp_path.joinpath(*["a directory with a long name"] * 6)
    directory.mkdir(parents=True)
    assert len(str(directory)) > 107
    return directory


def test_the_directory_may_have_any_length(deep):
    with open_server(deep), connected(deep):
        assert (deep / NAME).is_socket()
    assert list(deep.iterdir()) == []


def test_only_the_socket_of_a_killed_launcher_is_replaced(tmp_path):
    with socket.socket(socket.AF_UNIX) as dead, short_name(tmp_path / NAME) as name:
        dead.bind(name)
    with open_server(tmp_path):
        with ControlServer(tmp_path, ".") as second:
            assert second.open() == "another launcher listens there"
        with connected(tmp_path):
            pass
    (tmp_path / NAME).write_text("precious")
    with ControlServer(tmp_path, ".") as third:
        assert "is in the way" in third.open()
    assert (tmp_path / NAME).read_text() == "precious"
