"""Runs a candidate that is written as two roles, one process for each worker and each server.

driver ==pipe== worker 0 ┐ the candidate's ┌ server 0
       ==pipe== worker 1 ┴────transport────┴ server 1       servers say where they are before workers start
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from multiprocessing.connection import Connection
from typing import Any, ClassVar

import torch
from torch import Tensor, multiprocessing

from benchmarks.server.candidate import compare, sum_factor

LIMIT_S = 180  # for one answer of a worker
GRACE_S = 5  # to end
SETTLE_S = 0.3  # for the system to find cores for processes that were stopped


@dataclass(frozen=True)
class Place:
    """Who a process is among the others."""

    index: int  # within its role
    workers: int
    servers: int
    folder: str  # empty at the start and deleted at the end; for a file to meet at
    addresses: tuple[Any, ...] = ()  # what each server has announced; empty in a server


class Worker:
    """A worker's part. Connects in `__init__`. Subclasses write `prepare` and `round`, and the
    rest as they need.
    """

    def __init__(self, place: Place) -> None:
        self.place = place

    def prepare(self, gradient: Tensor) -> None:
        """Push this one from now on."""
        raise NotImplementedError

    def begin(self) -> None:
        """Called before each turn; not timed."""

    def round(self) -> Sequence[Tensor]:
        """Push, pull, and return what is held now, in one or several runs."""
        raise NotImplementedError

    def repeat(self, rounds: int) -> None:
        """What is timed."""
        for _ in range(rounds):
            self.round()

    def check(self, gradient: Tensor, factor: Fraction) -> None:
        """Raise WrongResult unless a round leaves `factor * gradient` here."""
        compare(f"worker {self.place.index}", self.round(), gradient, factor)

    def close(self) -> None:
        """Disconnect."""


class Crew:
    """A candidate made of `worker` and `serve`. Subclasses say what these are and have nothing
    to add.
    """

    worker: ClassVar[type[Worker]]
    sums: ClassVar[bool] = True  # False: an echo
    chief: ClassVar[bool] = (
        False  # True: one `worker` process, whose library starts those of both roles
    )
    spins: ClassVar[bool] = (
        False  # True: its processes keep cores busy while they wait, and are stopped between turns
    )

    @staticmethod
    def serve(place: Place, announce: Callable[[Any], None]) -> None:
        """Run one server: announce an address, then serve until the workers have gone or the
        process is ended.
        """

    def __init__(self, workers: int, servers: int) -> None:
        context = multiprocessing.get_context("forkserver")
        clients, shards = (1, 0) if self.chief else (workers, servers)
        self._count = workers
        self._folder = tempfile.TemporaryDirectory()
        self._servers = []
        for index in range(shards):
            place = Place(index, workers, servers, self._folder.name)
            self._servers.append(_Member(context, _serve, self.serve, place))
        addresses = tuple(server.answer() for server in self._servers)
        start = context.Barrier(clients)
        self._workers = []
        for index in range(clients):
            place = Place(index, workers, servers, self._folder.name, addresses)
            self._workers.append(_Member(context, _work, self.worker, place, start))
        self._answers()
        if self.spins:
            atexit.register(self._signal, signal.SIGCONT)  # who is stopped cannot be ended
            members = (*self._workers, *self._servers)
            self._wakes = _Member(
                context, _wake, self.worker, [member.process.pid for member in members]
            )
            self._signal(signal.SIGSTOP)

    def prepare(self, gradients: Sequence[Tensor]) -> None:
        with self._awake():
            for worker, gradient in zip(self._workers, gradients, strict=not self.chief):
                worker.pipe.send(("prepare", gradient))
            self._answers()

    def check(self) -> None:
        # A sum is a multiple of every worker's gradient; an echo gives each its own back.
        with self._awake():
            for index, worker in enumerate(self._workers):
                worker.pipe.send(
                    ("check", sum_factor(index, self._count) if self.sums else Fraction(1))
                )
            self._answers()

    def turn(self, rounds: int) -> float:
        with self._awake():
            for worker in self._workers:
                worker.pipe.send(("turn", rounds))
            begun, ended = zip(*self._answers(), strict=True)
        return max(ended) - min(begun)

    def close(self) -> None:
        if self.spins:
            self._signal(signal.SIGCONT)
            atexit.unregister(self._signal)
            self._wakes.process.kill()
        for worker in self._workers:
            worker.pipe.send(("close", None))
        for member in (*self._workers, *self._servers):
            member.process.join(GRACE_S)
        for member in (*self._workers, *self._servers):
            member.process.kill()
            member.process.join()
        self._folder.cleanup()

    @contextlib.contextmanager
    def _awake(self) -> Iterator[None]:
        if self.spins:
            self._signal(signal.SIGCONT)
            time.sleep(SETTLE_S)
        yield
        if self.spins:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for member in (*self._workers, *self._servers):
            if member.process.pid is not None and member.process.is_alive():
                os.kill(member.process.pid, number)

    def _answers(self) -> list[Any]:
        return [worker.answer() for worker in self._workers]


class _Member:
    """A process and the pipe to it."""

    def __init__(self, context: Any, run: Callable[..., None], *arguments: Any) -> None:
        self.role = arguments[0].__module__
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=run, args=(*arguments, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def answer(self) -> Any:
        if not self.pipe.poll(LIMIT_S):
            raise SystemExit(f"{self.role}: no answer within {LIMIT_S} s")
        try:
            return self.pipe.recv()
        except EOFError:
            raise SystemExit(f"{self.role}: a process has died; what it said is above") from None


def _serve(
    serve: Callable[[Place, Callable[[Any], None]], None], place: Place, driver: Connection
) -> None:
    torch.set_num_threads(1)
    serve(place, driver.send)


def _work(kind: type[Worker], place: Place, start: Any, driver: Connection) -> None:
    torch.set_num_threads(1)
    worker = kind(place)
    driver.send(None)
    try:
        _obey(worker, start, driver)
    finally:
        worker.close()


def _wake(_: type[Worker], pids: Sequence[int], driver: Connection) -> None:
    """Have those go on that are stopped when the driver is killed: they cannot see it."""
    with contextlib.suppress(EOFError):
        driver.recv()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _obey(worker: Worker, start: Any, driver: Connection) -> None:
    gradient = torch.empty(0)
    while True:
        try:
            order, value = driver.recv()
        except EOFError:  # the driver has died
            return
        if order == "close":
            return
        if order == "prepare":
            gradient = value
            worker.prepare(gradient)
            driver.send(None)
        elif order == "check":
            worker.begin()
            worker.check(gradient, value)
            driver.send(None)
        else:
            driver.send(_turn(worker, value, start))


def _turn(worker: Worker, rounds: int, start: Any) -> tuple[float, float]:
    """When it began and ended, on the clock that all processes of a machine share."""
    worker.begin()
    start.wait()
    begun_s = time.monotonic()
    worker.repeat(rounds)
    return begun_s, time.monotonic()
