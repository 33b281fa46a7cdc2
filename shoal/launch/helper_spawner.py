"""Helper processes of a rank, such as parameter servers, forked from a process that was forked
early.

    rank ── nursery ─┬─ helper        The nursery is forked before the rank has threads, connections or a GPU, so its
     │         ^     └─ helper        children inherit none of them: a dead rank's connections close when it dies, and
     └─────────┘                      no lock is copied while somebody holds it.
      a socket: orders, news

It ends with the rank, however that ends, and its helpers end with it. A helper costs milliseconds:
torch is there."""

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

EVENT_FORMAT = struct.Struct("<cii")
LENGTH = struct.Struct("<Q")
STARTED, ENDED = b"s", b"e"


class HelperSpawner:
    """Starts helpers, and hears of their ends. Make it before anything else is done in the process.

    Attributes: alive: pids of helpers. codes: exit codes of those that have ended, by pid; a
        negative one is the signal that killed it. changed: is notified when one starts or ends.
    """

    def __init__(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self._socket, theirs = socket.socketpair()
        if os.fork() == 0:
            _serve(theirs)
        theirs.close()
        self.alive: set[int] = set()
        self.codes: dict[int, int] = {}
        self.changed = threading.Condition()
        self._started: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._lock = threading.Lock()
        threading.Thread(target=self._hear, name="nursery", daemon=True).start()

    def start(self, target: Callable[..., Any], *arguments: Any, listener: socket.socket) -> int:
        """Call `target(listener, *arguments)` in a new process; its pid. The listener is theirs as
        well as ours.

        Raises: LaunchError: the nursery has ended.
        """
        payload = pickle.dumps((target, arguments))  # to a process of our own
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
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _hear(self) -> None:
        with contextlib.suppress(OSError):
            while news := self._socket.recv(EVENT_FORMAT.size, socket.MSG_WAITALL):
                kind, pid, code = EVENT_FORMAT.unpack(news)
                with self.changed:
                    if kind == STARTED:
                        self.alive.add(pid)
                        self._started.put(pid)
                    else:
                        self.alive.discard(pid)
                        self.codes[pid] = code
                    self.changed.notify_all()
        self._started.put(0)


def _serve(control: socket.socket) -> NoReturn:
    """The nursery's own life."""
    code = 1
    try:
        _close_other_fds(control.fileno())
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # the rank decides
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
    """Let go of all connections and files but one. Their numbers stay taken: objects that the rank
    had dropped may be collected here later, and would close whatever had come to have their
    number."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in map(int, os.listdir("/dev/fd")):
        if number > 2 and number not in (descriptor, nothing):
            os.dup2(nothing, number, inheritable=False)


def _reap(children: set[int], control: socket.socket) -> None:
    for pid in list(children):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            children.discard(pid)
            _send(control, ENDED, pid, os.waitstatus_to_exitcode(status))


def _send(control: socket.socket, kind: bytes, pid: int, code: int) -> None:
    with contextlib.suppress(
        ConnectionError
    ):  # the rank has ended, as its end of the socket says next
        control.sendall(EVENT_FORMAT.pack(kind, pid, code))


def _fork(control: socket.socket, children: set[int]) -> bool:
    """Take one order; whether there was one, and all of it."""
    try:
        head, descriptors, _, _ = socket.recv_fds(control, LENGTH.size, 1)
        if len(head) < LENGTH.size:
            return False
        length = LENGTH.unpack(head)[0]
        payload = control.recv(length, socket.MSG_WAITALL)
    except ConnectionError:  # the rank has ended without having read all news
        return False
    if len(payload) < length:
        return False
    pid = os.fork()
    if pid == 0:
        _run_child(control, descriptors[0], payload)
    os.close(descriptors[0])
    children.add(pid)
    _send(control, STARTED, pid, 0)
    return True


def _run_child(control: socket.socket, descriptor: int, payload: bytes) -> NoReturn:
    """A helper's own life."""
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
