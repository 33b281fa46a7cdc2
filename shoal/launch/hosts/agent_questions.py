"""Questions of the driver about a host, answered in threads beside the heartbeat."""

from __future__ import annotations

import contextlib
import importlib
import queue
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from shoal.launch.hosts.addresses import listeners, try_reach
from shoal.launch.hosts.agent_messages import Message

Answer = dict[str, Any]


class AgentQuestions:
    """Answers questions, each in a thread of its own."""

    def __init__(self) -> None:
        self._listeners: dict[int, socket.socket] = {}
        self._answers: queue.SimpleQueue[tuple[int, Answer]] = queue.SimpleQueue()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._kinds: dict[str, Callable[[Message], Answer]] = {
            "listen": self._listen,
            "reach": _try_reach,
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

    def take_listener(self, port: int) -> socket.socket | None:
        """Return the socket at `port`, for the store of ranks, if it is here; close all others."""
        chosen = self._listeners.pop(port, None)
        for listener in self._listeners.values():
            listener.close()
        self._listeners.clear()
        return chosen

    def close(self) -> None:
        """Close all sockets."""
        self.take_listener(0)
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

    def _listen(self, message: Message) -> Answer:
        self.take_listener(0)
        ports = {}
        for address, listener in listeners(message["addresses"]).items():
            ports[address] = int(listener.getsockname()[1])
            self._listeners[ports[address]] = listener
        return {"ports": ports}


def _try_reach(message: Message) -> Answer:
    return {"found": try_reach(message["ports"])}


def _call(message: Message) -> Answer:
    return {"value": imported(message["function"])(*message["arguments"])}


def imported(name: str) -> Callable[..., Any]:
    """Return the function `module:function`."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def _unknown(message: Message) -> Answer:
    return {"problem": f"this agent knows no question '{message['question']}'."}
