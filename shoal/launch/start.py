"""Start of ranks on this machine.

Ranks are forked from a fork server, which has imported torch once and has one thread.

Ranks of one host meet in memory of this process, see `private_memory`. Where a script may call
torch's init_process_group itself, there is a store of torch's too. It listens on a loopback port
that is bound before any process learns its number, so two runs cannot take one port. Ranks of
several hosts meet there too, at an address of one of them.

    this process -- fork server -+- torch's store
                                 +- rank 0 (a session of its own) -- its data-loader workers
                                 +- rank 1 ...
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

from shoal.errors import LaunchError
from shoal.launch import preload as preloads
from shoal.launch.environment import RANK_PROCESS, SERVER_HOSTS
from shoal.launch.output import (
    LineForwarder,
    Output,
    StreamName,
    print_lines,
)
from shoal.launch.private_memory import STORE, PrivateMemory
from shoal.launch.rank import STOP_SIGNALS, main, serve_store
from shoal.launch.rank_info import LOOPBACK
from shoal.launch.rank_set import HostShare
from shoal.launch.ranks import Rank, Ranks
from shoal.platform.sockets import make_socket_directory
from shoal.watchdog.hang_limit import limit_of_ranks
from shoal.watchdog.progress_word import ProgressMemory

TRACKER_S = 2.0
"""A process that a script has made by `os.fork` may keep the resource tracker for longer."""

StreamEnds = tuple[Connection | None, LineForwarder | None]
"""The end to which a rank writes, and the forwarder of its lines."""


def start(
    target: Callable[..., Any],
    arguments: tuple[Any, ...],
    processes: int,
    environment: Mapping[str, str],
    output: Output,
    *,
    preload: Iterable[str] = (),
    torch_store: bool = True,
    share: HostShare | None = None,
    is_stopped: Callable[[], bool] | None = None,
) -> Ranks:
    """Start `processes` ranks, each of which calls `target(*arguments)`.

    Args:
        target: a function of a module that can be imported; ranks find it by its name.
        arguments: plain data.
        processes: the number of ranks, >= 1.
        environment: added to this process's variables. The launcher's variables (see
            environment.py) are set on top.
        output: the outputs that the user sees (see output.py).
        preload: modules that the fork server imports besides torch. They count only in the call
            that starts the server.
        torch_store: serve a TCPStore, for `init_process_group` with `env://` in the target. Any
            user of the machine can connect to it.
        share: this host's part of the world; None where this host has all of it. Ranks on several
            hosts always meet in a store of torch's.
        is_stopped: tells, once everything is imported, whether the run shall end before it has
            begun. No rank is started then: a signal to one that is just starting would end it in
            the middle of anything.

    Raises:
        LaunchError: `processes` is below 1; the system is not Linux; the target or an argument
            cannot be pickled; the fork server has ended because of a module that it imported, or
            was killed.
    """
    if processes < 1:
        raise LaunchError(f"{processes} processes were asked for; there must be at least 1.")
    try:
        payload = pickle.dumps((target, arguments))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise LaunchError(
            f"{target!r} and its arguments cannot be sent to the ranks: {error}. "
            "The target must be a function at the top of a module, its arguments plain data."
        ) from error
    context = prepare(preload)
    # The address of this host's name may lead to another machine.
    share = share or HostShare(0, processes, LOOPBACK, 0, None, {"GLOO_SOCKET_IFNAME": "lo"}, None)
    with _named_end_of_fork_server():
        store, private, common = _start_stores(context, torch_store, share)
    if is_stopped is not None and store is None:  # which starts once everything is imported
        wait_for_imports(context)
    # Words lie by rank, also where the first ones are on other hosts.
    words = ProgressMemory(share.first_rank + processes)
    ranks = Ranks(store, private, words, limit_of_ranks(environment))
    # Without the variables of an outer torchrun or run on several hosts. The network interface is
    # that of `share`, unless the user has chosen another.
    outer = ("TORCHELASTIC_", SERVER_HOSTS, RANK_PROCESS)
    own = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    common = {**share.variables, **own, **environment, **common}
    try:
        for local_rank in range(0 if is_stopped and is_stopped() else processes):
            rank = share.first_rank + local_rank
            variables = {
                **common,
                "SHOAL_LAUNCHER": "local",
                "RANK": str(rank),
                "WORLD_SIZE": str(share.world),
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(processes),
            }
            streams = [
                _stream(context, output, rank, "stdout", share),
                _stream(context, output, rank, "stderr", share),
            ]
            with _named_end_of_fork_server():
                ranks.all.append(_start_rank(context, rank, payload, variables, streams, ranks))
    except BaseException:
        ranks.kill()
        raise
    return ranks


@contextmanager
def _named_end_of_fork_server() -> Iterator[None]:
    """Name the fork server in the error of a start that its end, at any moment, has broken."""
    try:
        yield
    except (EOFError, ConnectionError) as error:
        raise LaunchError(
            "The process that ranks are forked from has ended. If a message stands above, it is "
            "of a module that this process imports first; if none does, the process was killed: "
            "start the same command again."
        ) from error


def imported(name: str) -> Callable[..., Any]:
    """Return the function `module:function`."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def wait_for_imports(context: ForkServerContext) -> None:
    """Wait until a process of the context can start: the fork server has imported everything."""
    with _named_end_of_fork_server():
        process = context.Process(target=os.getpid)
        process.start()
        process.join()


def prepare(preload: Iterable[str] = ()) -> ForkServerContext:
    """Begin to import what ranks need, so that `start` does not wait for it. Main thread only.

    The fork server ends with the thread that has started it.

    Args:
        preload: as for `start`, with the target's module.

    Returns:
        The context of the ranks' processes. A process of it starts once the imports are done.
    """
    if sys.platform != "linux":
        raise LaunchError(
            f"Shoal starts ranks on Linux alone, and this is {sys.platform}. Start them by "
            "torchrun, whose variables it reads: torchrun --nproc-per-node 2 SCRIPT"
        )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*preloads.ALWAYS, *preload])
    make_socket_directory()
    _end_servers_at_exit()
    # The resource tracker comes first, because its start unblocks the signals that are blocked
    # next.
    resource_tracker.ensure_running()
    # The server inherits the blocked signals. It must survive a Ctrl-C or a SIGTERM to the process
    # group: were it gone, its ranks could not save and stop.
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
    return context


@cache
def _end_servers_at_exit() -> None:
    """Let this process end the fork server and the resource tracker, and wait for both, at its end.

    By themselves they end a moment after it. The priority is below those of all that uses them.
    """
    util.Finalize(None, _end_servers, exitpriority=-100)


def _end_servers() -> None:
    server: Any = forkserver._forkserver
    tracker: Any = resource_tracker._resource_tracker
    with suppress(OSError):  # it has been killed
        if server._forkserver_pid is not None:
            os.kill(server._forkserver_pid, signal.SIGKILL)  # its own end would take torch down
            os.waitpid(server._forkserver_pid, 0)
    with suppress(OSError):
        if tracker._fd is not None:
            os.close(tracker._fd)
            tracker._fd = None
            limit_s = time.monotonic() + TRACKER_S
            while not os.waitpid(tracker._pid, os.WNOHANG)[0] and time.monotonic() < limit_s:
                time.sleep(0.001)


def _start_stores(
    context: ForkServerContext, torch_store: bool, share: HostShare
) -> tuple[BaseProcess | None, PrivateMemory | None, dict[str, str]]:
    """Make the stores. Return them as `Ranks` takes them, and the variables for the ranks."""
    private, store = None, None
    variables: dict[str, str] = {}
    address, port, listener = share.address, share.port, share.listener
    if share.emit is None:  # all ranks are on this host
        private = PrivateMemory(STORE, "shoal-store")
        variables |= private.variables
        if torch_store:
            listener = socket.create_server((LOOPBACK, 0), backlog=1024)
            address, port = listener.getsockname()
    if listener is not None:
        with listener:  # the process takes it over
            store = context.Process(target=serve_store, args=(listener,), name="store")
            store.start()
    if torch_store:
        variables |= {
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            # With these two, `init_method="env://"` connects to a store that exists, on rank 0 too
            # (torch's rendezvous.py).
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
    return store, private, variables


def _start_rank(
    context: ForkServerContext,
    rank: int,
    payload: bytes,
    environment: Mapping[str, str],
    streams: Sequence[StreamEnds],
    ranks: Ranks,
) -> Rank:
    reader, report = context.Pipe(duplex=False)
    (stdout, stdout_lines), (stderr, stderr_lines) = streams
    progress = (ranks.progress.path, ranks.progress.stacks_path)
    given = (payload, environment, report, stdout, stderr, progress, ranks.hang_limit_s)
    process = context.Process(target=main, args=given, name=f"rank {rank}")
    process.start()
    # The rank has copies of these ends. A reader sees the end of a pipe only when all are closed.
    for end in (report, stdout, stderr):
        if end is not None:
            end.close()
    forwarders = [lines for lines in (stdout_lines, stderr_lines) if lines is not None]
    return Rank(rank, process, reader, forwarders)


def _stream(
    context: ForkServerContext, output: Output, rank: int, name: StreamName, share: HostShare
) -> StreamEnds:
    """Return the ends of stdout or of stderr."""
    if rank == 0 and output != "lines" and share.emit is None:  # else the driver has the terminal
        return Connection(os.dup(1 if name == "stdout" else 2), readable=False), None
    if rank != 0 and output == "first" and name == "stdout":
        return None, None
    source, end = context.Pipe(duplex=False)
    emit = partial(print_lines, rank, getattr(sys, name))
    if share.emit is not None:
        emit = partial(share.emit, rank, name)
    return end, LineForwarder(source, emit)
