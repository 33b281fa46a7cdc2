"""Run a candidate that has two roles: one process for each worker and one for each server.

driver ==pipe== worker 0 ┐ the candidate's ┌ server 0     servers announce their addresses
       ==pipe== worker 1 ┴────transport────┴ server 1     before workers start
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
SETTLE_S = 0.3  # for the kernel to schedule processes that were stopped


@dataclass(frozen=True)
class RoleAddress:
    """The role of a process: its index, the sizes of both roles, and the servers' addresses."""

    index: int  # within its role
    workers: int
    servers: int
    folder: str  # empty at the start, deleted at the end; holds a rendezvous file
    addresses: tuple[Any, ...] = ()  # what each server has announced; empty in a server


class Worker:
    """One worker, which connects in `__init__`. Subclasses implement `prepare` and `round`, and
    override the other methods where they need to.
    """

    def __init__(self, address: RoleAddress) -> None:
        self.address = address

    def prepare(self, gradient: Tensor) -> None:
        """Push this gradient in all rounds that follow."""
        raise NotImplementedError

    def begin(self) -> None:
        """Prepare for the rounds that are timed next; this call is not timed."""

    def round(self) -> Sequence[Tensor]:
        """Push, pull, and return the values that this worker has now, in one or several pieces."""
        raise NotImplementedError

    def repeat(self, rounds: int) -> None:
        """Do all rounds. This call is timed."""
        for _ in range(rounds):
            self.round()

    def check(self, gradient: Tensor, factor: Fraction) -> None:
        """Raise WrongResult unless a round leaves `factor * gradient` here."""
        compare(f"worker {self.address.index}", self.round(), gradient, factor)

    def close(self) -> None:
        """Disconnect."""


class RoleProcesses:
    """A candidate made of `worker` and `serve`. Subclasses define only these two."""

    worker: ClassVar[type[Worker]]
    sums: ClassVar[bool] = True  # False: an echo
    # True: one `worker` process, whose library starts the processes of both roles.
    chief: ClassVar[bool] = False
    # True: its processes spin while they wait, and are stopped while other candidates are timed.
    spins: ClassVar[bool] = False

    @staticmethod
    def serve(address: RoleAddress, announce: Callable[[Any], None]) -> None:
        """Run one server: announce an address, then serve until the workers disconnect or the
        process is killed.
        """

    def __init__(self, workers: int, servers: int) -> None:
        context = multiprocessing.get_context("forkserver")
        clients, shards = (1, 0) if self.chief else (workers, servers)
        self._count = workers
        self._folder = tempfile.TemporaryDirectory()
        self._servers = []
        for index in range(shards):
            address = RoleAddress(index, workers, servers, self._folder.name)
            self._servers.append(RoleProcess(context, _serve, self.serve, address))
        addresses = tuple(server.receive() for server in self._servers)
        start = context.Barrier(clients)
        self._workers = []
        for index in range(clients):
            address = RoleAddress(index, workers, servers, self._folder.name, addresses)
            self._workers.append(RoleProcess(context, _work, self.worker, address, start))
        self._receive_all()
        if self.spins:
            atexit.register(self._signal, signal.SIGCONT)  # a stopped process cannot end
            processes = (*self._workers, *self._servers)
            self._waker = RoleProcess(
                context, _wake, self.worker, [role.process.pid for role in processes]
            )
            self._signal(signal.SIGSTOP)

    def prepare(self, gradients: Sequence[Tensor]) -> None:
        with self._awake():
            for worker, gradient in zip(self._workers, gradients, strict=not self.chief):
                worker.pipe.send(("prepare", gradient))
            self._receive_all()

    def check(self) -> None:
        # A sum is a multiple of every worker's gradient; an echo returns its own to each.
        with self._awake():
            for index, worker in enumerate(self._workers):
                worker.pipe.send(
                    ("check", sum_factor(index, self._count) if self.sums else Fraction(1))
                )
            self._receive_all()

    def run_rounds(self, rounds: int) -> float:
        with self._awake():
            for worker in self._workers:
                worker.pipe.send(("rounds", rounds))
            started, ended = zip(*self._receive_all(), strict=True)
        return max(ended) - min(started)

    def close(self) -> None:
        if self.spins:
            self._signal(signal.SIGCONT)
            atexit.unregister(self._signal)
            self._waker.process.kill()
        for worker in self._workers:
            worker.pipe.send(("close", None))
        for role in (*self._workers, *self._servers):
            role.process.join(GRACE_S)
        for role in (*self._workers, *self._servers):
            role.process.kill()
            role.process.join()
        self._folder.cleanup()

    @contextlib.contextmanager
    def _awake(self) -> Iterator[None]:
        if self.spins:
            self._signal(signal.SIGCONT)
            time.sleep(SETTLE_S)
        yield
        if self.spins:
            self._signal(signal.SIGSTOP)

    def _signal(self, signal_number: signal.Signals) -> None:
        for role in (*self._workers, *self._servers):
            if role.process.pid is not None and role.process.is_alive():
                os.kill(role.process.pid, signal_number)

    def _receive_all(self) -> list[Any]:
        return [worker.receive() for worker in self._workers]


class RoleProcess:
    """A process and the pipe to it."""

    def __init__(self, context: Any, run: Callable[..., None], *arguments: Any) -> None:
        self.role = arguments[0].__module__
        self.pipe, remote_end = context.Pipe()
        self.process = context.Process(target=run, args=(*arguments, remote_end), daemon=True)
        self.process.start()
        remote_end.close()

    def receive(self) -> Any:
        if not self.pipe.poll(LIMIT_S):
            raise SystemExit(f"{self.role}: no answer within {LIMIT_S} s")
        try:
            return self.pipe.recv()
        except EOFError:
            raise SystemExit(f"{self.role}: a process has died; its output is above") from None


def _serve(
    serve: Callable[[RoleAddress, Callable[[Any], None]], None],
    address: RoleAddress,
    driver: Connection,
) -> None:
    torch.set_num_threads(1)
    serve(address, driver.send)


def _work(kind: type[Worker], address: RoleAddress, start: Any, driver: Connection) -> None:
    torch.set_num_threads(1)
    worker = kind(address)
    driver.send(None)
    try:
        _serve_driver(worker, start, driver)
    finally:
        worker.close()


def _wake(_: type[Worker], pids: Sequence[int], driver: Connection) -> None:
    """Continue stopped processes when the driver is killed: they cannot see it themselves."""
    with contextlib.suppress(EOFError):
        driver.recv()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _serve_driver(worker: Worker, start: Any, driver: Connection) -> None:
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
            driver.send(_timed_rounds(worker, value, start))


def _timed_rounds(worker: Worker, rounds: int, start: Any) -> tuple[float, float]:
    """Do the rounds. Return start and end on the clock that all processes of a machine share."""
    worker.begin()
    start.wait()
    started_s = time.monotonic()
    worker.repeat(rounds)
    return started_s, time.monotonic()
