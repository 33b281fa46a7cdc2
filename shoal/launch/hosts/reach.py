"""A try of a connection to another host.

other host                                  first host, ReachListener
connect ==================================> accept
"NONCE\\n" --------------------------------->
       <----------------------------------- "\\n"
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
from shoal.platform.sockets import listen_at

REACH_S = 2.0
"""Seconds to wait for one connection between two hosts."""
LINE_BYTES = 512
AT_ONCE = 64  # connections at a time; others wait in the queue of the socket
CLOSING_S = 0.1  # between two looks, while all are open, for the end of the listener
BACKLOG = 256


@dataclass(frozen=True)
class Reach(CheckedJson):
    """The outcome of one host's try to reach one address of the first host.

    Args:
        address: that was tried.
        source: this host's own address on the way there; None where there is no way.
        problem: empty where there is none.
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
                listener = listen_at(address, backlog=BACKLOG)
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
            self._greet(connection)
        finally:
            self._open.release()

    def _greet(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, EOFError):
            connection.settimeout(REACH_S)
            if hmac.compare_digest(_line(connection), self._nonce):
                connection.sendall(b"\n")


def try_reach(ports: Mapping[str, int], nonce: str) -> list[Reach]:
    """Return for each address in `ports` whether this host reaches it.

    All are tried at once. It takes less than twice REACH_S.

    Args:
        ports: of the first host's ReachListener.
        nonce: the same as there.
    """
    if not ports:
        return []
    with ThreadPoolExecutor(len(ports), "reach") as tries:
        return list(tries.map(lambda item: _try_address(item[0], item[1], nonce), ports.items()))


def _try_address(address: str, port: int, nonce: str) -> Reach:
    source = None
    try:
        with socket.create_connection((address, port), REACH_S) as connection:
            source = str(connection.getsockname()[0])
            connection.sendall(f"{nonce}\n".encode())
            answer = _line(connection)
    except EOFError:
        return Reach(address, source, "another program answers there")
    except OSError as error:
        return Reach(address, source, _reason(error))
    return Reach(address, source, "another program answers there" if answer else "")


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
