"""The socket in a run's directory: who may use it, what it takes, and that it goes."""

from __future__ import annotations

import json
import os
import select
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.errors import LaunchError
from shoal.launch import control_server
from shoal.launch.control_client import request
from shoal.launch.control_server import (
    MAX_CALLERS,
    MAX_LINE_BYTES,
    NAME,
    ControlConnection,
    ControlServer,
    short_name,
)


@contextmanager
def listens(folder: Path) -> Iterator[ControlServer]:
    with ControlServer(folder, ".") as listening:
        assert listening.open() == ""
        yield listening


def connected(folder: Path) -> socket.socket:
    caller = socket.socket(socket.AF_UNIX)
    caller.settimeout(10)
    with short_name(folder / NAME) as name:
        caller.connect(name)
    return caller


def attended(listening: ControlServer) -> list[tuple[ControlConnection, dict]]:
    """What comes next."""
    select.select(listening.sources, [], [], 10)
    return listening.accept_requests()


def test_it_is_its_owners_alone_and_gone_at_the_end(tmp_path):
    before = os.umask(0)
    try:
        with listens(tmp_path):
            assert stat.S_IMODE((tmp_path / NAME).stat().st_mode) == 0o600
            assert os.umask(0) == 0
    finally:
        os.umask(before)
    assert list(tmp_path.iterdir()) == []


def test_it_waits_until_the_directory_is_the_runs(tmp_path):
    with ControlServer(tmp_path / "run", "config.yaml") as listening:
        assert not listening.is_due
        (tmp_path / "run").mkdir()
        assert not listening.is_due
        assert listening.sources == listening.accept_requests() == []
        (tmp_path / "run/config.yaml").touch()
        assert listening.is_due
        assert listening.open() == ""
        assert not listening.is_due
        connected(tmp_path / "run").close()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.yaml"]


def test_a_request_is_answered_in_lines(tmp_path):
    with listens(tmp_path) as listening, connected(tmp_path) as asking:
        asking.sendall(b'{"scale"')
        assert attended(listening) == []
        asking.sendall(b": 3}\n")
        ((caller, request),) = attended(listening)
        assert request == {"scale": 3}
        caller.send(stopping=2)
        caller.send(step=7)
        caller.close()
        assert [json.loads(line) for line in asking.makefile()] == [{"stopping": 2}, {"step": 7}]
        assert len(listening.sources) == 1


@pytest.mark.parametrize(
    "said", [b"\n", b"scale 3\n", b"[3]\n", b"\xff\xfe\n", b"x" * (MAX_LINE_BYTES + 1)]
)
def test_what_is_no_request_is_refused_and_the_next_one_is_heard(tmp_path, said):
    with listens(tmp_path) as listening:
        with connected(tmp_path) as asking:
            asking.sendall(said)
            while not select.select([asking], [], [], 0)[0]:
                assert attended(listening) == []
            assert len(listening.sources) == 1
            assert "this is no request" in json.loads(asking.makefile().readline())["refused"]
        with connected(tmp_path) as asking:
            asking.sendall(b"{}\n")
            ((caller, _),) = attended(listening)
            caller.close()


def test_who_hangs_up_is_forgotten(tmp_path):
    with listens(tmp_path) as listening:
        connected(tmp_path).close()
        assert attended(listening) == []
        assert len(listening.sources) == 1


def test_only_so_many_may_wait(tmp_path):
    with listens(tmp_path) as listening:
        callers = []
        for _ in range(MAX_CALLERS + 1):
            callers.append(connected(tmp_path))
            listening.accept_requests()
        assert len(listening.sources) == 1 + MAX_CALLERS
        assert callers[-1].recv(1) == b""
        turned_away = threading.Thread(target=attended, args=(listening,))
        turned_away.start()
        with pytest.raises(LaunchError, match="has hung up: it has ended, or too many call it"):
            list(request(tmp_path, scale=2))
        turned_away.join()
        for caller in callers:
            caller.close()


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    directory = tmp_path.joinpath(*["a directory with a long name"] * 6)
    directory.mkdir(parents=True)
    assert len(str(directory)) > control_server.MAX_NAME_BYTES
    return directory


def test_the_directory_may_have_any_length(deep):
    with listens(deep), connected(deep):
        assert (deep / NAME).is_socket()
    assert list(deep.iterdir()) == []


def test_where_no_name_is_short_enough_nobody_can_call_and_the_run_does_without(deep, monkeypatch):
    monkeypatch.setattr(control_server.sys, "platform", "darwin")
    with ControlServer(deep, ".") as listening:
        assert "more than 103 bytes" in listening.open()
        assert not listening.is_due
        assert listening.sources == listening.accept_requests() == []


def test_what_a_killed_launcher_has_left_is_taken_and_what_another_uses_is_not(tmp_path):
    with socket.socket(socket.AF_UNIX) as dead, short_name(tmp_path / NAME) as name:
        dead.bind(name)
    with listens(tmp_path):
        with ControlServer(tmp_path, ".") as second:
            assert second.open() == "another launcher listens there"
        with connected(tmp_path):
            pass
    (tmp_path / NAME).write_text("precious")
    with ControlServer(tmp_path, ".") as third:
        assert "is in the way" in third.open()
    assert (tmp_path / NAME).read_text() == "precious"
