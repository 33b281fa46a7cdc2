"""Helper processes of a rank, such as parameter servers, forked from an early copy of the rank.

    rank ── spawner process ─┬─ helper
     │             ^         └─ helper
     └─────────────┘
      a socket: requests, events

The rank forks the spawner process before it has threads, connections or a GPU, so helpers inherit
none of them. When the rank dies, its connections close at once, for no helper has a copy. And no
helper starts with a lock that some thread of the rank had locked.

The spawner process ends with the rank, however the rank ends, and the helpers end with the spawner.
A helper starts in milliseconds, because torch is imported already.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import select
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from shoal.errors import LaunchError
from shoal.launch.failure import end_of_process, own_reporter

EVENT_FORMAT = struct.Struct("<cii")  # kind, pid, exit code
LENGTH = struct.Struct("<Q")  # bytes of the pickled target, which follow
STARTED = b"s"
ENDED = b"e"


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
        self._socket, child_socket = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            _run_spawner(child_socket)
        child_socket.close()
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
                socket.send_fds(self._socket, [LENGTH.pack(len(payload))], [listener.fileno()])
                self._socket.sendall(payload)
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
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _run(self) -> None:
        """Receive events until the spawner process ends."""
        with contextlib.suppress(OSError):
            while event := self._socket.recv(EVENT_FORMAT.size, socket.MSG_WAITALL):
                kind, pid, code = EVENT_FORMAT.unpack(event)
                with self.changed:
                    if kind == STARTED:
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
        if not self._is_closed:
            own_reporter().lost(
                "lost the process from which its helpers, such as parameter servers, are forked "
                f"(process {self._pid}): it {end}"
            )


def _run_spawner(control: socket.socket) -> NoReturn:
    """Run the spawner process: fork helpers and report their ends, until the rank has ended."""
    code = 1
    try:
        _close_other_fds(control.fileno())
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # the rank decides
        # SIGCHLD writes to a pipe, so that one select waits for requests and for ends.
        wakeup, alarm = os.pipe()
        os.set_blocking(alarm, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(alarm)
        children: set[int] = set()
        while True:
            ready, _, _ = select.select([control.fileno(), wakeup], [], [])
            if wakeup in ready:
                os.read(wakeup, 4096)
                _reap(children, control)
            if control.fileno() in ready and not _fork(control, children):
                break
        for child in children:
            os.kill(child, signal.SIGKILL)
        code = 0
    except BaseException:  # noqa: BLE001 - it must not go on as a copy of the rank
        traceback.print_exc()
    finally:
        os._exit(code)


def _close_other_fds(descriptor: int) -> None:
    """Close all connections and files except one.

    The numbers of the closed ones then refer to /dev/null. An object that the rank had dropped may
    be collected here later, and closes its number: that must not be the number of a new file.
    """
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in map(int, os.listdir("/dev/fd")):
        if number > 2 and number not in (descriptor, null):
            os.dup2(null, number, inheritable=False)


def _reap(children: set[int], control: socket.socket) -> None:
    """Remove the children that have ended, and send their exit codes."""
    for pid in list(children):
        ended_pid, status = os.waitpid(pid, os.WNOHANG)
        if ended_pid:
            children.discard(pid)
            _send(control, ENDED, pid, os.waitstatus_to_exitcode(status))


def _send(control: socket.socket, kind: bytes, pid: int, code: int) -> None:
    # After the rank has ended nobody receives it; the next read of the socket reports that.
    with contextlib.suppress(ConnectionError):
        control.sendall(EVENT_FORMAT.pack(kind, pid, code))


def _fork(control: socket.socket, children: set[int]) -> bool:
    """Read one request and fork its helper. Return False if the rank has ended."""
    try:
        head, descriptors, _, _ = socket.recv_fds(control, LENGTH.size, 1)
        if len(head) < LENGTH.size:
            return False
        length = LENGTH.unpack(head)[0]
        payload = control.recv(length, socket.MSG_WAITALL)
    except ConnectionError:  # the rank has ended with unread events
        return False
    if len(payload) < length:
        return False
    pid = os.fork()
    if pid == 0:
        _run_helper(control, descriptors[0], payload)
    os.close(descriptors[0])
    children.add(pid)
    _send(control, STARTED, pid, 0)
    return True


def _run_helper(control: socket.socket, descriptor: int, payload: bytes) -> NoReturn:
    """Call the target in a helper process, then end the process."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        control.close()
        target, arguments = pickle.loads(payload)
        target(socket.socket(fileno=descriptor), *arguments)
        code = 0
    except BaseException:  # noqa: BLE001 - whatever it is, it must be seen
        traceback.print_exc()
    finally:
        os._exit(code)
