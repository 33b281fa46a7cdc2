"""Processes on hosts, and their answers. They are forked from a program that has imported torch, so
each starts in milliseconds.

program ── fork ──> enter(host) ── function(pipe, ...)     one process in one host's network
   └──────── pipe: orders, answers ──────────┘
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

HostFunction = Callable[..., Any]
END_S = 20.0


@dataclass(frozen=True)
class HostProcess:
    """A process on a host, and the program's end of its pipe."""

    name: str
    process: BaseProcess
    pipe: Connection


class WorkerPool:
    """Processes on hosts. A context manager that ends them all, also after an error."""

    def __init__(self) -> None:
        self.processes: list[HostProcess] = []

    def __enter__(self) -> WorkerPool:
        return self

    def start(self, host: int, function: HostFunction, *arguments: Any) -> HostProcess:
        """Call `function(pipe, *arguments)` on a host; its result is the last answer."""
        local_end, remote_end = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        process = context.Process(target=_run, args=(host, remote_end, function, *arguments))
        process.start()
        remote_end.close()
        host_process = HostProcess(f"{function.__name__} on {address(host)}", process, local_end)
        self.processes.append(host_process)
        return host_process

    def receive(self, process: HostProcess, limit_s: float) -> Any:
        """Return the next answer. Raises LaunchError: a process failed, or none came in time."""
        limit = time.monotonic() + limit_s
        while not process.pipe.poll(0.2):
            for other in self.processes:
                if other.process.exitcode not in (None, 0) and not other.pipe.poll():
                    raise LaunchError(f"{other.name} ended with {other.process.exitcode}.")
            if time.monotonic() > limit:
                raise LaunchError(f"{process.name} has not answered for {limit_s:g} s.")
        try:
            kind, answer = process.pipe.recv()
        except EOFError:
            raise LaunchError(f"{process.name} ended without an answer.") from None
        if kind == "failed":
            raise LaunchError(f"{process.name} failed:\n{answer}")
        return answer

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for host_process in self.processes:
            with contextlib.suppress(OSError):
                # To close the pipe would not do: forked processes have copies of its ends.
                host_process.pipe.send("end")
        for host_process in self.processes:
            host_process.process.join(END_S if kind is None else 0.2)
            if host_process.process.is_alive():
                host_process.process.kill()
                host_process.process.join()


def answer(pipe: Connection, value: Any) -> None:
    """Send an answer to the program."""
    pipe.send(("answer", value))


def await_end(pipe: Connection) -> None:
    """Wait until the pool ends its processes."""
    pipe.recv()


def _run(host: int, pipe: Connection, function: HostFunction, *arguments: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    code = 1
    try:
        enter(host)
        answer(pipe, function(pipe, *arguments))
        code = 0
    except BaseException:  # noqa: BLE001 - the program must see every failure
        pipe.send(("failed", traceback.format_exc()))
    finally:
        pipe.close()
        os._exit(code)  # skip the cleanup that belongs to the program
