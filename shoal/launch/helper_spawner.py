"""Helper processes of a rank, such as parameter servers, forked from an early copy of the rank.

    rank ── spawner process ─┬─ helper
     │             ^         └─ helper
     └─────────────┘
      a pipe: requests, events

The rank forks the spawner process before it has threads, connections or a GPU, so helpers inherit
none of them. When the rank dies, its connections close at once, for no helper has a copy. And no
helper starts with a lock that some thread of the rank had locked.

The spawner process ends with the rank, however the rank ends, and the helpers end with the spawner.
A helper starts in milliseconds, because torch is imported already.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

from shoal.errors import LaunchError
from shoal.launch.failure import end_of_process, report_loss

END = b""  # in the place of a pickled target
LISTENER = b"L"  # goes with a listener's descriptor


class HelperSpawner:
    """Starts helper processes and observes their ends.

    Create it first of all in a process: before threads, connections and devices.

    Attributes:
        alive: pids of the helpers that run.
        codes: exit codes of the helpers that have ended, by pid; a negative one is the signal that
            killed the helper.
        changed: notified when a helper starts or ends.
    """

    def __init__(self) -> None:
        # Output that is still buffered would be written by both processes.
        sys.stdout.flush()
        sys.stderr.flush()
        self._connection, connection = multiprocessing.Pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _run_spawner(connection)
        connection.close()
        self.alive: set[int] = set()
        self.codes: dict[int, int] = {}
        self.changed = threading.Condition()
        self._started: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False
        threading.Thread(target=self._run, name="helper spawner", daemon=True).start()

    def start(self, target: Callable[..., Any], *arguments: Any, listener: socket.socket) -> int:
        """Call `target(listener, *arguments)` in a new process, and return its pid.

        The helper gets a copy of `listener`; the caller's own stays open.

        Raises:
            LaunchError: the spawner process has ended.
        """
        payload = pickle.dumps((target, arguments))  # to a process of our own, so pickle is safe
        with self._lock:
            try:
                self._connection.send_bytes(payload)
                with _as_socket(self._connection) as socket_:
                    socket.send_fds(socket_, [LISTENER], [listener.fileno()])
            except OSError as error:
                raise LaunchError(
                    f"the process that helpers are forked from has ended: {error}"
                ) from error
            pid = self._started.get()
        if pid == 0:
            raise LaunchError("the process that helpers are forked from has ended.")
        return pid

    def close(self) -> None:
        """End all helpers."""
        self._is_closed = True
        with contextlib.suppress(OSError), self._lock:
            self._connection.send_bytes(END)

    def _run(self) -> None:
        """Receive events until the spawner process ends."""
        with contextlib.suppress(OSError, EOFError):
            while True:
                pid, code = self._connection.recv()
                with self.changed:
                    if code is None:
                        self.alive.add(pid)
                        self._started.put(pid)
                    else:
                        self.codes[pid] = code
                        self.alive.discard(pid)
                    self.changed.notify_all()
        self._started.put(0)  # a `start` that waits must return
        end = "has ended"
        with contextlib.suppress(ChildProcessError):
            end = end_of_process(os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1]))
        self._connection.close()
        if not self._is_closed:
            report_loss(
                "lost the process from which its helpers, such as parameter servers, are forked "
                f"(process {self._pid}): it {end}"
            )


def _run_spawner(requests: Connection) -> NoReturn:
    """Run the spawner process: fork helpers and report their ends, until the rank has ended."""
    code = 1
    try:
        _close_other_fds(requests.fileno())
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # the rank decides
        helpers: dict[Any, BaseProcess] = {}  # by what can be read once they have ended
        is_asked = False
        while not is_asked or _start_helper(requests, helpers):
            ready = wait([requests, *helpers])
            is_asked = requests in ready
            for ended in helpers.keys() & set(ready):
                helper = helpers.pop(ended)
                helper.join()
                _send(requests, helper.pid, helper.exitcode)
        for helper in helpers.values():
            helper.kill()
        code = 0
    except BaseException:  # noqa: BLE001 - it must not go on as a copy of the rank
        traceback.print_exc()
    finally:
        os._exit(code)


def _as_socket(connection: Connection) -> socket.socket:
    """Return a socket on which descriptors go.

    `send_handle` of multiprocessing waits for an answer from Python 3.14 on, which the thread that
    receives events would take.
    """
    return socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM)


def _close_other_fds(descriptor: int) -> None:
    """Close all connections and files except one.

    The numbers of the closed ones then refer to /dev/null. An object that the rank had dropped may
    be collected here later, and closes its number: that must not be the number of a new file.
    """
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in map(int, os.listdir("/dev/fd")):
        if number > 2 and number not in (descriptor, null):
            os.dup2(null, number, inheritable=False)


def _start_helper(requests: Connection, helpers: dict[Any, BaseProcess]) -> bool:
    """Read one request and fork its helper. Return False if all helpers are to end."""
    try:
        payload = requests.recv_bytes()
        if payload == END:
            return False
        with _as_socket(requests) as socket_:
            _, (descriptor,), *_ = socket.recv_fds(socket_, len(LISTENER), 1)
    except (EOFError, ConnectionError, ValueError):  # the rank has ended
        return False
    fork = multiprocessing.get_context("fork")
    helper = fork.Process(target=_run_helper, args=(requests, descriptor, payload))
    helper.start()
    os.close(descriptor)
    helpers[helper.sentinel] = helper
    _send(requests, helper.pid, None)
    return True


def _send(requests: Connection, pid: int | None, code: int | None) -> None:
    # After the rank has ended nobody receives it; the next read of the connection reports that.
    with contextlib.suppress(ConnectionError):
        requests.send((pid, code))


def _run_helper(requests: Connection, descriptor: int, payload: bytes) -> None:
    """Call the target in a helper process."""
    requests.close()
    target, arguments = pickle.loads(payload)
    target(socket.socket(fileno=descriptor), *arguments)
