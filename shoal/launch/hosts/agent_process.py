"""The process of an agent: it owns the connection to the driver, the ranks, and the clock.

    ssh ── agent ─┬─ fork server ─┬─ store of torch, on one host
                  │               └─ ranks, each with its data-loader workers
                  └─ threads that answer questions about this host

The agent decides nothing; see `agent_session`. When it ends, however it ends, all of these end.
"""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from math import inf
from multiprocessing.connection import Pipe, wait
from typing import Any, NoReturn

from shoal.errors import ShoalError
from shoal.launch.environment import SERVER_HOSTS
from shoal.launch.failure import Failure
from shoal.launch.hosts.addresses import listeners, network_variables, try_reach
from shoal.launch.hosts.agent_session import (
    KILL_S,
    MARKER,
    PROTOCOL,
    AgentSession,
    Message,
    Order,
    clock_s,
    shortened,
)
from shoal.launch.hosts.host_facts import FactsRequest, collect_facts
from shoal.launch.private_memory import SECRET, PrivateMemory
from shoal.launch.rank_set import SECONDS_BETWEEN_LOOKS, HostShare, RankEvent, RankExited
from shoal.launch.ranks import Ranks
from shoal.launch.start import imported, prepare, start, wait_for_imports
from shoal.platform.processes import adopt_orphans, kill_descendants
from shoal.watchdog.progress_word import decode_page

RETRY_S = 0.02  # until the connection takes more bytes
POLL_S = 1.0
TELL_S = 5.0
"""Seconds from one message about the progress of ranks to the next."""
READ_BYTES = 1 << 16

Answer = dict[str, Any]


def run_agent() -> NoReturn:
    """Run this process as an agent: its driver is at the other end of standard input and output."""
    source, sink = _take_streams()
    # Python was started in the root directory, which must not be searched for modules.
    sys.path[0] = os.path.dirname(sys.executable)
    adopt_orphans()
    agent = AgentProcess(source, sink)
    code = 1
    try:
        agent.run()
        code = 0
    finally:
        if code:  # the traceback stands before what the end of ranks may print
            sys.excepthook(*sys.exc_info())
        agent.close()
        # Handlers at the end of an interpreter might wait for what was just killed.
        os._exit(code)


def _take_streams() -> tuple[int, int]:
    """Return descriptors of standard input and output, which nothing else has from now on.

    A process that held one of them would hold ssh open. What is printed goes to standard error.
    """
    source, sink = os.dup(0), os.dup(1)
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)
    os.dup2(2, 1)
    os.set_blocking(source, False)
    os.set_blocking(sink, False)
    return source, sink


class AgentProcess:
    """The body around an AgentSession.

    Args:
        source: descriptor from which the driver's messages are read, non-blocking.
        sink: descriptor to which messages are written, non-blocking.
    """

    def __init__(self, source: int, sink: int) -> None:
        self.session = AgentSession(clock_s())
        self.ranks: Ranks | None = None
        self._listeners: dict[str, socket.socket] = {}
        self._source = source
        self._sink = sink
        self._unsent = f"\n{MARKER} {PROTOCOL} {secrets.token_hex(8)}\n".encode()
        self._work: Message = {}
        self._look_s = inf
        self._tell_s = 0.0
        self._is_over = False
        self._answers, self._answered = Pipe(duplex=False)
        self._lock = threading.Lock()  # of the threads that answer questions

    def run(self) -> None:
        """Do what the driver says until it ends the run, or the lease ends."""
        while not self._is_over:
            self._send()
            due_s = min(self.session.due_s, self._look_s) - clock_s()
            timeout_s = max(0.0, min(due_s, RETRY_S if self._unsent else POLL_S))
            for event in self._wait(timeout_s):
                self._on_event(event)
            while self._answers.poll():
                number, answer = self._answers.recv()
                self.session.tell("answer", number=number, **answer)
            self._obey(self._receive())
            self._obey(self.session.tick(clock_s()))
            self._look()

    def close(self) -> None:
        """End everything that was started."""
        self._kill_ranks()
        kill_descendants(KILL_S)

    def _wait(self, timeout_s: float) -> Sequence[RankEvent]:
        sources: list[Any] = [self._source, self._answers]
        if self.ranks is None:
            wait(sources, timeout_s)
            return []
        try:
            return self.ranks.watch(timeout_s, sources)
        except ShoalError as error:  # the store has ended
            rank = self.ranks.all[0].number
            self._kill_ranks()
            return [Failure(rank, text=str(error), is_loss=True)]

    def _receive(self) -> list[Order]:
        try:
            data = os.read(self._source, READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        return self.session.received(data, clock_s())

    def _send(self) -> None:
        """Write as much as the connection takes now."""
        try:
            while self._unsent or (lines := self.session.to_send()):
                self._unsent = self._unsent or lines
                self._unsent = self._unsent[os.write(self._sink, self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:  # the end of the input says the same
            self._unsent = b""

    def _obey(self, orders: Sequence[Order]) -> None:
        for order in orders:
            match order:
                case {"do": "spec"}:
                    self._specify(order)
                case {"do": "ask", "number": number}:
                    task = number, self._answering(order)
                    threading.Thread(target=self._answer, args=task, daemon=True).start()
                case {"do": "start"}:
                    self._start(order)
                case {"do": "signal", "rank": rank, "signal": signal}:
                    for process in self.ranks.alive if self.ranks is not None else ():
                        if process.number == rank:
                            process.signal(signal)
                case {"do": "kill"}:
                    self._kill_ranks()
                    self.session.stopped()
                case {"do": "end", "reason": reason}:
                    print(f"shoal agent: {reason}", file=sys.stderr)
                    self._is_over = True

    def _answer(self, number: int, find: Callable[[], Answer]) -> None:
        try:
            answer = find()
        except Exception as error:  # noqa: BLE001 - whatever it is, the driver must see it
            answer = {"problem": f"{type(error).__name__}: {error}"}
        with self._lock:
            self._answered.send((number, answer))

    def _answering(self, question: Message) -> Callable[[], Answer]:
        """Begin to answer a question. Return what a thread does for it, as it may take long."""
        match question["question"]:
            case "prepare":  # imports what ranks need in the fork server
                context = prepare(self._work["preload"])
                ports = self._listen(question["addresses"])

                def prepared() -> Answer:
                    wait_for_imports(context)
                    return {"ports": ports}

                return prepared
            case "reach":
                return lambda: {"reached": try_reach(question["ports"])}
            case "stacks":
                ranks, rank = self.ranks, question["rank"]
                return lambda: {"text": shortened(ranks.stacks(rank)) if ranks is not None else ""}
        return lambda: {"value": imported(question["function"])(*question["arguments"])}

    def _listen(self, addresses: Sequence[str]) -> dict[str, int]:
        """Listen at addresses of this host; return their ports. One is for the ranks' store."""
        self._take_listener("")
        self._listeners = listeners(addresses)
        return {address: int(one.getsockname()[1]) for address, one in self._listeners.items()}

    def _take_listener(self, address: str) -> socket.socket | None:
        """Return the socket at this address, if it is here; close all others."""
        chosen = self._listeners.pop(address, None)
        for listener in self._listeners.values():
            listener.close()
        self._listeners.clear()
        return chosen

    def _specify(self, message: Message) -> None:
        os.environ.update(message["variables"])
        secret = PrivateMemory(SECRET, "shoal-secret", bytes.fromhex(message["secret"]))
        os.environ.update(secret.variables)
        # Ranks search for modules where this process does; its own variables came before it.
        paths = str(message["variables"].get("PYTHONPATH", "")).split(os.pathsep)
        sys.path[1:1] = [path for path in paths if path and path not in sys.path]
        request = FactsRequest(**message["request"])
        with contextlib.suppress(OSError):  # the facts say that it is missing
            os.chdir(request.cwd)
            os.environ["PWD"] = request.cwd
        self._work = message["work"]
        self.session.hello(asdict(collect_facts(request)), clock_s())

    def _start(self, message: Message) -> None:
        """Start this host's ranks, or what starts its servers."""
        listener = self._take_listener(message["address"])
        share = HostShare(
            first_rank=int(message["first"]),
            world=int(message["world"]),
            address=message["address"],
            port=int(message["port"]),
            listener=listener,
            variables={
                **network_variables(message["address"]),
                SERVER_HOSTS: str(message["server_hosts"]),
            },
            emit=lambda rank, name, lines: self.session.output(rank, name, "".join(lines)),
        )
        try:
            self.ranks = start(
                imported(message["target"]),
                tuple(message["arguments"]),
                int(message["count"]),
                self._work["environment"],
                self._work["output"],
                preload=self._work["preload"],
                share=share,
            )
            if self.ranks.hang_limit_s > 0:
                self._look_s = clock_s()
        except ShoalError as error:
            self._on_event(Failure(share.first_rank, text=str(error)))
            for local_rank in range(int(message["count"])):
                self.session.ended(share.first_rank + local_rank, 1)

    def _look(self) -> None:
        """Count the silence of ranks, once in SECONDS_BETWEEN_LOOKS, and tell it once in TELL_S."""
        now_s = clock_s()
        if now_s >= self._look_s and self.ranks is not None:
            self._look_s = now_s + SECONDS_BETWEEN_LOOKS
            self.ranks.look()
            if now_s >= self._tell_s:
                self._tell_s = now_s + TELL_S
                self.session.tell("look", look=sent_look(self.ranks))

    def _on_event(self, event: RankEvent) -> None:
        match event:
            case RankExited(rank, code):
                self.session.ended(rank, code)
            case Failure():
                told = {**vars(event), "age_s": time.monotonic() - event.time_s}
                texts = {name: shortened(told[name]) for name in ("headline", "text")}
                self.session.tell("failed", **told | texts)

    def _kill_ranks(self) -> None:
        if self.ranks is not None:
            self.ranks.kill()
        self.ranks = None
        self._look_s = inf


def sent_look(ranks: Ranks) -> list[tuple[int, float, str]]:
    """Look at the ranks of this host. Return number, silence and page of each."""
    # Pages come first: a rank that goes on before the look is not silent in it. One that writes its
    # word just now has none in its page: `pack_into` begins with zeros.
    pages = {rank.number: ranks.progress.page(rank.number) for rank in ranks.alive}
    return [
        (rank, each.silent_s, base64.b64encode(zlib.compress(pages[rank], 1)).decode())
        for rank, each in ranks.look().items()
        if decode_page(pages[rank]) is not None
    ]
