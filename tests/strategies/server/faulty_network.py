"""A network with faults on request: proxies in front of every server.

    worker ── proxy ──> server ── proxy ──> backup       A proxy reads frame by frame, so a fault
                ^                   ^                    begins in the middle of a frame of the
                └─ coordinator's process ┘               requested kind.

The coordinator gives out the proxies' addresses. The only change to Shoal is the function that runs
in the coordinator's process and in a server's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from shoal.parameter_server import launcher
from shoal.parameter_server.cluster_config import ClusterConfig
from shoal.parameter_server.codec import FIRST_SERVER, Op
from shoal.parameter_server.coordinator.coordinator import Address, View
from shoal.parameter_server.coordinator.coordinator_server import CoordinatorServer
from shoal.parameter_server.node import node_server
from shoal.parameter_server.transport.connection import HEADER_BYTES, Connection, unpack
from shoal.parameter_server.transport.settings import _HELLO, _START, UNIX, _connected, address_of
from shoal.parameter_server.transport.settings import listen as listen_at

TO_SERVER_BYTES = (_START.size, _HELLO.size)
FROM_SERVER_BYTES = (_START.size, 1)
PHASES = {"push": Op.PUSH, "apply": Op.STEP, "replicate": Op.REPLICATE, "pull": Op.PARAMS}


@dataclass(frozen=True)
class Trouble:
    """A fault that happens once, at the `nth` frame of a kind.

    Args:
        folder: for the pids of servers and for a mark once it has happened.
        what: cut, truncate, replay, slow or late; or a signal and a role, `SIGKILL primary`.
        op: of the frame.
        seconds: how long a late frame is late.
    """

    folder: Path
    what: str
    op: Op
    nth: int
    seconds: float = 0.3

    @property
    def mark(self) -> Path:
        return self.folder / "happened"

    def install(self) -> None:
        """Install the proxies. Called in the rank that starts servers, before it does."""
        launcher.serve_coordinator = partial(_arbitrate, self)  # type: ignore[assignment]
        launcher.serve = partial(_serve, self.folder)  # type: ignore[assignment]


def _serve(folder: Path, listener: socket.socket, plan: node_server.ServerConfig) -> None:
    (folder / f"{plan.server}.pid").write_text(str(os.getpid()))
    node_server.serve(listener, plan)


def _arbitrate(trouble: Trouble, listener: socket.socket, court: ClusterConfig) -> None:
    (trouble.folder / "coordinator.pid").write_text(str(os.getpid()))
    Network(trouble, court, listener).run()


class Network(CoordinatorServer):
    """A coordinator that gives the addresses of proxies, different ones to workers and servers."""

    def __init__(self, trouble: Trouble, court: ClusterConfig, listener: socket.socket) -> None:
        super().__init__(court, listener)
        self.trouble, self.ways = trouble, dict[tuple[int, bool], Address]()
        self.met, self.slow_until, self.counting = 0, 0.0, threading.Lock()

    def _send_view(self, peer: Connection, view: View) -> None:
        inside = any(
            found is peer and number >= FIRST_SERVER for number, found in self.peers.items()
        )
        ways = {
            server: self._way(server, inside, address) for server, address in view.addresses.items()
        }
        super()._send_view(peer, replace(view, addresses=ways))

    def _way(self, server: int, inside: bool, address: Address) -> Address:
        if (server, inside) not in self.ways:
            port = (
                self.trouble.folder / f"{server}-{inside}.port"
            )  # the next coordinator's proxies have the same ones
            listener = _listen_again(int(port.read_text())) if port.exists() else listen_at(UNIX)
            self.ways[server, inside] = address_of(listener)
            port.write_text(str(address_of(listener)[1]))
            threading.Thread(
                target=self._proxy, args=(listener, server, address), daemon=True
            ).start()
        return self.ways[server, inside]

    def _proxy(self, listener: socket.socket, server: int, address: Address) -> None:
        while True:
            near, _ = listener.accept()
            try:
                far = _connected(address, limit_s=5)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            for way in ((near, far, TO_SERVER_BYTES), (far, near, FROM_SERVER_BYTES)):
                threading.Thread(target=self._pass_on, args=(*way, server), daemon=True).start()

    def _pass_on(
        self,
        source: socket.socket,
        sink: socket.socket,
        handshake_bytes: tuple[int, ...],
        server: int,
    ) -> None:
        with contextlib.suppress(OSError, EOFError):
            for size_bytes in handshake_bytes:
                sink.sendall(_exactly(source, size_bytes))
            while True:
                head = _exactly(source, HEADER_BYTES)
                header = unpack(head)
                self._pass_frame(
                    head + _exactly(source, header.length), header.op, source, sink, server
                )
        for end in (source, sink):  # an end that has gone has gone for the other too
            _hang_up(end)

    def _pass_frame(
        self, frame: bytes, op: int, source: socket.socket, sink: socket.socket, server: int
    ) -> None:
        half = len(frame) // 2
        if time.monotonic() < self.slow_until:
            time.sleep(0.004)
        if not self._begins(op, server):
            sink.sendall(frame)
            return
        if op == Op.STEP:  # the step is taken when all of it has come
            sink.sendall(frame)
            self._happen(source, sink, server)
            return
        sink.sendall(frame[:half])
        self._happen(source, sink, server)
        sink.sendall(frame[half:])
        if self.trouble.what == "replay":
            sink.sendall(frame)

    def _begins(self, op: int, server: int) -> bool:
        """Return True if it happens now, and for the first time."""
        if (
            op != self.trouble.op or not self._view(server).backups
        ):  # there must be one to survive the loss of another
            return False
        with self.counting:
            self.met += 1
            return self.met == self.trouble.nth and not self.trouble.mark.exists()

    def _view(self, server: int) -> View:
        return next(
            (view for view in self.coordinator.views.values() if server in view.members), View(-1)
        )

    def _happen(self, source: socket.socket, sink: socket.socket, server: int) -> None:
        what, said = self.trouble.what, ""
        match what.split():
            case ["cut"]:
                for end in (source, sink):
                    _hang_up(end)
            case ["truncate"]:
                sink.shutdown(socket.SHUT_WR)  # its end has half a frame, the other does not know
                with contextlib.suppress(ConnectionError):  # which may be how it hears of it
                    while source.recv(1 << 16):
                        pass
            case ["slow"]:
                self.slow_until = time.monotonic() + 2
            case ["late"]:
                time.sleep(self.trouble.seconds)
            case [name, role]:
                pid = self._pid(role, server)
                said = f"{name} {pid}"
                self._say(said)
                os.kill(pid, getattr(signal, name))
                time.sleep(0.05)  # the frame's other half comes when the signal has done its work
        if not said:
            self._say(what)

    def _say(self, said: str) -> None:
        partial_mark = self.trouble.folder / "happening"
        partial_mark.write_text(said)
        os.replace(partial_mark, self.trouble.mark)

    def _pid(self, role: str, server: int) -> int:
        if role == "coordinator":
            return os.getpid()
        if role == "worker":
            return int((self.trouble.folder / "worker.pid").read_text())
        view = self._view(server)
        return int(
            (
                self.trouble.folder
                / f"{view.primary if role == 'primary' else view.backups[0]}.pid"
            ).read_text()
        )


def _listen_again(port: int) -> socket.socket:
    """Listen at the Unix address of a proxy whose process has ended."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{port:05x}")
    listener.listen()
    return listener


def wake(trouble: Trouble, after_s: float) -> None:
    """Continue a stopped process some time after it was stopped."""
    for said in _waits_for(trouble.mark):
        name, _, pid = said.partition(" ")
        if name == "SIGSTOP":
            time.sleep(after_s)
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGCONT)


def _waits_for(mark: Path) -> Iterator[str]:
    while not mark.exists():
        time.sleep(0.01)
    yield mark.read_text()


def _exactly(source: socket.socket, size_bytes: int) -> bytes:
    found = source.recv(size_bytes, socket.MSG_WAITALL) if size_bytes else b""
    if len(found) < size_bytes:
        raise EOFError
    return found


def _hang_up(end: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it may have gone by itself
        end.shutdown(socket.SHUT_RDWR)
