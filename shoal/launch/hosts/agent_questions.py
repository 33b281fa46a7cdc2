"""Questions of the driver about a host, answered in threads beside the heartbeat."""

from __future__ import annotations

import contextlib
import importlib
import queue
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from shoal.launch.hosts.agent_messages import Message
from shoal.launch.hosts.reach import ReachListener, try_reach
from shoal.launch.hosts.shared_directory import remove_probe, sees_probe, write_probe
from shoal.platform.interfaces import family_of

Answer = dict[str, Any]


class AgentQuestions:
    """Answers questions, each in a thread of its own.

    Attributes:
        store_listeners: sockets for the store of ranks, by port, until they are used.
    """

    def __init__(self) -> None:
        self.store_listeners: dict[int, socket.socket] = {}
        self._reach: ReachListener | None = None
        self._answers: queue.SimpleQueue[tuple[int, Answer]] = queue.SimpleQueue()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._kinds: dict[str, Callable[[Message], Answer]] = {
            "store": self._open_store,
            "listen": self._listen,
            "reach": self._try_reach,
            "unlisten": self._unlisten,
            "write-probe": self._write_probe,
            "sees-probe": self._sees_probe,
            "remove-probe": self._remove_probe,
            "call": _call,
        }

    def fileno(self) -> int:
        """Return a descriptor that can be read once an answer is there."""
        return self._woken.fileno()

    def ask(self, message: Message) -> None:
        """Begin to answer a question."""
        kind = self._kinds.get(message["question"], _unknown)
        self.answer_later(int(message["number"]), partial(kind, message))

    def answer_later(self, number: int, find: Callable[[], Answer | None]) -> None:
        """Call `find` in a thread; it returns the answer to the question `number`."""
        threading.Thread(target=self._answer, args=(number, find), daemon=True).start()

    def answers(self) -> list[tuple[int, Answer]]:
        """Return the answers that are there, with the numbers of their questions."""
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._answers.get_nowait())
        return found

    def close(self) -> None:
        """Close all sockets."""
        self._unlisten({})
        for listener in self.store_listeners.values():
            listener.close()
        self.store_listeners.clear()
        self._woken.close()
        self._waker.close()

    def _answer(self, number: int, find: Callable[[], Answer | None]) -> None:
        try:
            answer = find() or {}
        except Exception as error:  # noqa: BLE001 - whatever it is, the driver must see it
            answer = {"problem": f"{type(error).__name__}: {error}"}
        self._answers.put((number, answer))
        with contextlib.suppress(OSError):
            self._waker.send(b".")

    def _open_store(self, message: Message) -> Answer:
        """Bind a socket for the store of torch at the address that all ranks reach."""
        for listener in self.store_listeners.values():
            listener.close()
        self.store_listeners.clear()
        address = str(message["address"])
        listener = socket.create_server((address, 0), family=family_of(address), backlog=1024)
        port = int(listener.getsockname()[1])
        self.store_listeners[port] = listener
        return {"port": port}

    def _listen(self, message: Message) -> Answer:
        self._unlisten(message)
        self._reach = ReachListener(message["addresses"], message["nonce"])
        return {"ports": dict(self._reach.ports)}

    def _unlisten(self, message: Message) -> Answer:
        if self._reach is not None:
            self._reach.close()
            self._reach = None
        return {}

    def _try_reach(self, message: Message) -> Answer:
        found = try_reach(message["ports"], message["nonce"])
        return {"found": [reach.to_json() for reach in found]}

    def _write_probe(self, message: Message) -> Answer:
        probe = write_probe(message["directory"], message["nonce"])
        return {"probe": None if probe is None else str(probe)}

    def _sees_probe(self, message: Message) -> Answer:
        return {"sees": sees_probe(message["probe"], message["nonce"])}

    def _remove_probe(self, message: Message) -> Answer:
        remove_probe(Path(message["probe"]))
        return {}


def _call(message: Message) -> Answer:
    return {"value": imported(message["function"])(*message["arguments"])}


def imported(name: str) -> Callable[..., Any]:
    """Return the function `module:function`."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def _unknown(message: Message) -> Answer:
    return {"problem": f"this agent knows no question '{message['question']}'."}
