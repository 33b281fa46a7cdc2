"""Another user at the sockets and directories that a run makes: nothing opens."""

from __future__ import annotations

import os
import socket
import stat
import threading
from pathlib import Path
from types import SimpleNamespace

from strangers import needs_python, needs_root, python_of_stranger

from shoal.launch.control_channel import NAME, ControlServer
from shoal.launch.hosts.agent_process import AgentProcess
from shoal.parameter_server.launcher import ClusterLauncher
from shoal.parameter_server.transport.acceptor import Acceptor
from shoal.parameter_server.transport.key import Key
from shoal.parameter_server.transport.settings import UNIX, Transport, listen
from shoal.platform.files import make_private_directory

CONNECTS = """
import socket, sys
try:
    socket.socket(socket.AF_UNIX).connect(sys.argv[1])
    print("connected")
except OSError as error:
    print(type(error).__name__)
"""
READS = """
import sys
try:
    open(sys.argv[1], "rb")
    print("read")
except OSError as error:
    print(type(error).__name__)
"""
SAYS_HELLO = """
import socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect("\\0" + sys.argv[1])
try:
    server.sendall(b"SHPS" + bytes(38))
    print("heard", server.recv(100))
except (BrokenPipeError, ConnectionResetError):
    print("heard b''")
"""
REFUSED = "PermissionError"


@needs_root
@needs_python
def test_another_user_cannot_ask_a_run_for_other_ranks(public: Path) -> None:
    (public / "marker").touch()
    with ControlServer(public, "marker") as server:
        assert server.open() == ""
        assert python_of_stranger(CONNECTS, str(public / NAME)).stdout.strip() == REFUSED


def test_temporary_directories_open_to_nobody_else(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = make_private_directory("shoal-test-", str(tmp_path))
    finally:
        os.umask(before)
    assert stat.S_IMODE(made.stat().st_mode) == 0o700


def test_the_store_of_several_hosts_listens_at_the_address_that_was_found_alone() -> None:
    agent = AgentProcess(0, 1)
    found = agent._listen(["127.0.0.2", "127.0.0.3"])
    store = agent._take_listener("127.0.0.2")
    assert store is not None
    with store, socket.socket() as other:
        assert store.getsockname() == ("127.0.0.2", found["127.0.0.2"])
        assert other.connect_ex(("127.0.0.3", found["127.0.0.3"])) != 0
        assert other.connect_ex(("127.0.0.1", found["127.0.0.2"])) != 0


@needs_root
@needs_python
def test_another_user_who_connects_to_a_server_is_refused_unheard() -> None:
    transport = Transport(Key(bytes(32)), "job")
    with listen(UNIX) as listener:
        acceptor = Acceptor(listener, "a server", transport, 2)
        thread = threading.Thread(target=acceptor.accept, args=(print,))
        thread.start()
        try:
            name = listener.getsockname()[1:].decode()
            assert python_of_stranger(SAYS_HELLO, name).stdout.strip() == "heard b''"
            assert acceptor.refused == 1
        finally:
            acceptor.close()
            thread.join()


def test_servers_listen_on_a_unix_socket_or_at_the_address_that_leads_to_rank_0() -> None:
    def listens_at(world: int, address: str | None) -> str:
        place = SimpleNamespace(local_world=2, world=world, master_address=address, server_hosts=0)
        launcher = SimpleNamespace(mesh=SimpleNamespace(place=place))
        return ClusterLauncher._listen_host(launcher)  # type: ignore[arg-type]

    assert listens_at(2, "192.0.2.1") == UNIX
    assert listens_at(4, None) == UNIX
    assert listens_at(4, "127.0.0.9") == "127.0.0.1"  # the way there begins at loopback
    if Path("/proc/net/if_inet6").exists() and Path("/proc/net/if_inet6").read_text():
        assert listens_at(4, "::1") == "::1"
