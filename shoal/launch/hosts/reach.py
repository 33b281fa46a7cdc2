"""A try of a connection to another host, and of one back from it.

other host                                  first host, ReachListener
connect ==================================> accept
"NONCE PORT\\n" ---------------------------->
accept <=================================== connect to the caller's address and PORT
       <----------------------------------- "NONCE\\n"
       <----------------------------------- "\\n", or the problem of the way back
"""

from __future__ import annotations

import hmac
import os
import selectors
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from shoal.launch.hosts.checked_json import CheckedJson
from shoal.platform.interfaces import family_of

REACH_S = 2.0
"""Seconds to wait for one connection between two hosts."""
LINE_BYTES = 512
AT_ONCE = 64  # connections at a time; others wait in the queue of the socket
CLOSING_S = 0.1  # between two looks, while all are open, for the end of the listener
BACKLOG = 256
STRANGER_S = 1.0  # for the line of a connection back, which was sent before it is read


@dataclass(frozen=True)
class Reach(CheckedJson):
    """The outcome of one host's try to reach one address of the first host, and to be reached.

    Args:
        address: that was tried.
        source: this host's own address on the way there; None where there is no way.
        problem: empty where both directions work.
    """

    address: str
    source: str | None
    problem: str


class ReachListener:
    """Sockets at which other hosts can try to reach this one, answered by threads of their own.

    A context; leaving it closes the sockets and ends the threads. A connection that does not begin
    with the nonce is closed without an answer. While AT_ONCE are open none is accepted, so that
    strangers cannot take all the descriptors of this process.

    Args:
        addresses: of this host; those that it cannot listen on are left out of `ports`.
        nonce: known to the driver and its agents alone, and used for nothing else. It goes over the
            network as it is.

    Attributes:
        ports: the port of each address.
    """

    def __init__(self, addresses: Sequence[str], nonce: str) -> None:
        self._nonce = nonce.encode()
        self._listeners: list[socket.socket] = []
        self._wake, self._woken = socket.socketpair()
        self._open = threading.BoundedSemaphore(AT_ONCE)
        self._is_closing = False
        self.ports: Mapping[str, int] = self._listen(addresses)
        self._answers = ThreadPoolExecutor(AT_ONCE, "reach")
        self._thread = threading.Thread(target=self._accept, name="reach-listener", daemon=True)
        self._thread.start()

    def __enter__(self) -> ReachListener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all sockets and wait for the threads. A second call changes nothing."""
        if self._thread.is_alive():
            self._is_closing = True
            self._wake.close()
            self._thread.join()
            self._woken.close()
            for listener in self._listeners:
                listener.close()
            self._answers.shutdown(cancel_futures=True)

    def _listen(self, addresses: Sequence[str]) -> dict[str, int]:
        ports = {}
        for address in addresses:
            with suppress(OSError):
                listener = _listening(address)
                listener.setblocking(False)
                self._listeners.append(listener)
                ports[address] = listener.getsockname()[1]
        return ports

    def _accept(self) -> None:
        """Accept connections until the other end of `_woken` is closed."""
        with selectors.DefaultSelector() as selector:
            for source in (self._woken, *self._listeners):
                selector.register(source, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if self._woken in ready:
                    return
                for listener in ready:
                    assert isinstance(listener, socket.socket)
                    self._accept_one(listener)

    def _accept_one(self, listener: socket.socket) -> None:
        """Accept a connection, once fewer than AT_ONCE are open."""
        while not self._open.acquire(timeout=CLOSING_S):
            if self._is_closing:
                return
        try:
            connection, _ = listener.accept()
        except OSError:  # the other end may have gone again
            self._open.release()
        else:
            self._answers.submit(self._answer, connection)

    def _answer(self, connection: socket.socket) -> None:
        """Answer a connection, and make room for another one."""
        try:
            self._reach_back_to(connection)
        finally:
            self._open.release()

    def _reach_back_to(self, connection: socket.socket) -> None:
        """Connect back to the host that has connected, and tell it how that went."""
        with connection, suppress(OSError, ValueError, EOFError, OverflowError):
            connection.settimeout(REACH_S)
            nonce, _, port = _line(connection).partition(b" ")
            if hmac.compare_digest(nonce, self._nonce):
                peer = connection.getpeername()[0]
                problem = _reach_back(peer, int(port), self._nonce)
                connection.sendall(problem.encode() + b"\n")


def try_reach(ports: Mapping[str, int], nonce: str, timeout_s: float = REACH_S) -> list[Reach]:
    """Return for each address in `ports` whether this host reaches it and is reached from there.

    All are tried at once. It takes less than `timeout_s` and twice REACH_S together.

    Args:
        ports: of the first host's ReachListener.
        nonce: the same as there.
        timeout_s: to wait for the connection.
    """
    if not ports:
        return []
    with ThreadPoolExecutor(len(ports), "reach") as tries:
        return list(
            tries.map(lambda item: _try_address(item[0], item[1], nonce, timeout_s), ports.items())
        )


def _try_address(address: str, port: int, nonce: str, timeout_s: float) -> Reach:
    source = None
    try:
        with socket.create_connection((address, port), timeout_s) as connection:
            source = str(connection.getsockname()[0])
            with _listening(source) as listener:
                own_port = listener.getsockname()[1]
                connection.sendall(f"{nonce} {own_port}\n".encode())
                # The other host tells how its way back went, and needs as long for a try in vain.
                connection.settimeout(2 * REACH_S)
                answer = _line(connection).decode(errors="backslashreplace")
                return Reach(address, source, answer or _came_back(listener, nonce))
    except EOFError:
        return Reach(address, source, "another program answers there")
    except OSError as error:
        return Reach(address, source, _reason(error))


def _came_back(listener: socket.socket, nonce: str) -> str:
    """Return an empty text if the first host's connection lies in the queue of `listener`.

    Connections of others may lie there before it.
    """
    end_s = time.monotonic() + REACH_S
    while (left_s := end_s - time.monotonic()) > 0:
        listener.settimeout(left_s)
        with suppress(OSError, EOFError):
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(min(left_s, STRANGER_S))
                if hmac.compare_digest(_line(connection), nonce.encode()):
                    return ""
    return "the connection back came from another program"


def _reach_back(peer: str, port: int, nonce: bytes) -> str:
    """Connect to a host that has connected. Return the problem; empty where there is none."""
    try:
        with socket.create_connection((peer, port), REACH_S) as back:
            back.sendall(nonce + b"\n")
    except OSError as error:
        return f"the way back to {peer}: {_reason(error)}"
    return ""


def _listening(address: str) -> socket.socket:
    return socket.create_server((address, 0), family=family_of(address), backlog=BACKLOG)


def _line(connection: socket.socket) -> bytes:
    """Return the bytes before the next newline.

    Raises:
        EOFError: the other end closed the connection, or sent too much.
        TimeoutError: it sent no line within the socket's timeout.
    """
    data = b""
    end_s = time.monotonic() + (connection.gettimeout() or 0.0)
    while not data.endswith(b"\n"):
        piece = connection.recv(LINE_BYTES)
        data += piece
        if not piece or len(data) > LINE_BYTES:
            raise EOFError
        if time.monotonic() > end_s:
            raise TimeoutError
    return data[:-1]


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "timed out"
    return (os.strerror(error.errno) if error.errno else str(error)).lower()
