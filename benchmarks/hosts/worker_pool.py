"""Processes on hosts, and what each answers: forked from a program that has imported torch, so they
cost milliseconds.

program ── fork ──> enter(host) ── play(its end of a pipe, ...)     one process, one host, one network
   └──────── pipe: orders, answers ────────┘
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

from benchmarks.hosts.namespaces import address, enter
from shoal.errors import LaunchError

Play = Callable[..., Any]
END_S = 20.0


@dataclass(frozen=True)
class Actor:
    """A process, and this end of its pipe."""

    name: str
    process: BaseProcess
    pipe: Connection


class Cast:
    """Processes on hosts; ended with the block, whatever ends it."""

    def __init__(self) -> None:
        self.actors: list[Actor] = []

    def __enter__(self) -> Cast:
        return self

    def start(self, host: int, play: Play, *arguments: Any) -> Actor:
        """Call `play(pipe, *arguments)` on a host; what it returns is its last answer."""
        here, there = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        process = context.Process(target=_live, args=(host, there, play, *arguments))
        process.start()
        there.close()
        actor = Actor(f"{play.__name__} on {address(host)}", process, here)
        self.actors.append(actor)
        return actor

    def hear(self, actor: Actor, limit_s: float) -> Any:
        """The next answer. Raises LaunchError: somebody has failed, or there is none in time."""
        limit = time.monotonic() + limit_s
        while not actor.pipe.poll(0.2):
            for other in self.actors:
                if other.process.exitcode not in (None, 0) and not other.pipe.poll():
                    raise LaunchError(f"{other.name} ended with {other.process.exitcode}.")
            if time.monotonic() > limit:
                raise LaunchError(f"{actor.name} has not answered for {limit_s:g} s.")
        try:
            kind, answer = actor.pipe.recv()
        except EOFError:
            raise LaunchError(f"{actor.name} ended without an answer.") from None
        if kind == "failed":
            raise LaunchError(f"{actor.name} failed:\n{answer}")
        return answer

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for actor in self.actors:
            with contextlib.suppress(OSError):
                actor.pipe.send(
                    "end"
                )  # that a pipe is closed nobody hears: other processes have copies of its ends
        for actor in self.actors:
            actor.process.join(END_S if kind is None else 0.2)
            if actor.process.is_alive():
                actor.process.kill()
                actor.process.join()


def answer(pipe: Connection, what: Any) -> None:
    """Tell the program."""
    pipe.send(("answer", what))


def await_end(pipe: Connection) -> None:
    """Until the block of the cast has ended."""
    pipe.recv()


def _live(host: int, pipe: Connection, play: Play, *arguments: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    code = 1
    try:
        enter(host)
        answer(pipe, play(pipe, *arguments))
        code = 0
    except BaseException:  # noqa: BLE001 - whatever it is, the program must hear of it
        pipe.send(("failed", traceback.format_exc()))
    finally:
        pipe.close()
        os._exit(code)  # nothing of the program's is to be cleaned up twice
